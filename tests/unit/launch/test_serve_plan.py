"""The plan passes between processes unchanged, a start is recorded, and a process ends with its parent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coldstart.contract.plan import LaunchPlan
from coldstart.contract.weights import WeightsRequest
from coldstart.system import timeline
from coldstart.system.recording import recording

SOUND = LaunchPlan([], weights_from=WeightsRequest("s3://b", Path("/p"))).document()


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (SOUND | {"more": 1}, "launch plan is from another release of coldstart: these members differ: more"),
        (SOUND | {"engine": {}}, "engine task is from another release"),
        (SOUND | {"engine": None}, "invalid engine task: expected a JSON object"),
        (
            SOUND | {"weights_from": {"source": "s3://b"}},
            "weights request .* these members differ: pace, plan",
        ),
        ([], "invalid launch plan: expected a JSON object"),
    ],
)
def test_a_plan_of_another_release_is_refused_by_name(document: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        LaunchPlan.parse(json.dumps(document))


@pytest.fixture
def no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(timeline.EVENTS_VARIABLE, raising=False)


@pytest.mark.usefixtures("no_events")
class TestRecording:
    def test_spans_of_this_and_other_processes_are_saved(self, tmp_path: Path) -> None:
        with recording(tmp_path / "trace.json") as made:
            timeline.emit("here", 1.0, 2.0, track="t")
            child = "from coldstart.system import timeline; timeline.emit('there', 2, 3, track='t')"
            subprocess.run([sys.executable, "-c", child], check=True)
        assert [span.name for span in made.timeline.spans] == ["coldstart", "here", "there"]
        saved = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert {"coldstart", "here", "there"} <= {event["name"] for event in saved}

    def test_spans_of_a_ready_server_are_saved_at_its_end(self, tmp_path: Path) -> None:
        file = tmp_path / "trace.json"
        with recording(file) as made:
            made.started()
            assert "swap in" not in file.read_text()
            timeline.emit("swap in", 1.0, 2.0, track="scheduler")
        assert "swap in" in file.read_text()


def test_a_process_ends_with_its_parent() -> None:
    code = (
        "import os, time, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', "
        "'from coldstart.system.proc.lifeline import die_with_parent as d; d(9); print(1, flush=True);"
        " import time; time.sleep(60)'], stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pidfd = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    try:
        import select

        assert select.select([pidfd], [], [], 10)[0]
    finally:
        os.close(pidfd)
