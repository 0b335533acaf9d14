"""The plan passes between processes unchanged, a start is recorded, and a process ends with its parent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstart.contract.fallback import Fallback
from coldstart.contract.graphs import EngineTask
from coldstart.contract.plan import LaunchPlan
from coldstart.contract.weights import WeightsRequest
from coldstart.system import timeline
from coldstart.system.recording import recording

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
IDS = st.lists(st.integers(0, 1 << 31))
PATHS = st.builds(Path, TEXT)
TASKS = st.builds(
    EngineTask,
    record=st.none() | PATHS,
    kv_note=st.none() | PATHS,
    kv_plan=st.none() | st.lists(st.dictionaries(TEXT, TEXT | st.integers())),
    compiled=st.none() | PATHS,
)
PLANS = st.builds(
    LaunchPlan,
    st.lists(TEXT),
    key=TEXT,
    weights=TEXT,
    compile_dir=st.none() | TEXT,
    canary=st.none() | st.fixed_dictionaries({"prompt": IDS, "tokens": IDS}),
    env=st.dictionaries(st.from_regex(r"[A-Z]+_TESTED", fullmatch=True), TEXT),
    weights_from=st.none() | st.builds(WeightsRequest, TEXT, PATHS),
    engine=TASKS,
    fallbacks=st.lists(st.builds(Fallback, TEXT, TEXT, st.none() | TEXT.filter(bool))),
)


@given(PLANS)
def test_an_installed_plan_is_the_current_one(plan: LaunchPlan) -> None:
    before = dict(os.environ)
    try:
        plan.install()
        assert LaunchPlan.current() == plan
        assert {name: os.environ[name] for name in plan.env} == plan.env
    finally:
        os.environ.clear()
        os.environ.update(before)


SOUND = LaunchPlan([], weights_from=WeightsRequest("s3://b", Path("/p"))).document()


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (SOUND | {"more": 1}, "launch plan is from another version of coldstart: these fields differ: more"),
        (SOUND | {"engine": {}}, "engine task is from another release"),
        (SOUND | {"engine": None}, "invalid engine task: expected a JSON object"),
        (
            SOUND | {"weights_from": {"source": "s3://b"}},
            "weights request .* these fields differ: pace, plan",
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

    def test_file_named_by_another_process_is_retained(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(timeline.EVENTS_VARIABLE, str(tmp_path / "events"))
        with recording() as made:
            timeline.emit("here", 1.0, 2.0, track="t")
        assert os.environ[timeline.EVENTS_VARIABLE] == str(tmp_path / "events")
        assert len((tmp_path / "events").read_text().splitlines()) == 2 == len(made.timeline.spans)

    def test_spans_of_a_ready_server_are_saved_at_its_end(self, tmp_path: Path) -> None:
        file = tmp_path / "trace.json"
        with recording(file) as made:
            made.started()
            assert "swap in" not in file.read_text()
            timeline.emit("swap in", 1.0, 2.0, track="scheduler")
        assert "swap in" in file.read_text()

    @pytest.mark.parametrize(
        "damage", [lambda events: events.unlink(), lambda events: events.write_text("{")]
    )
    def test_ready_server_is_kept_when_its_spans_are_lost(self, damage: Callable[[Path], object]) -> None:
        with recording() as made:
            damage(Path(os.environ[timeline.EVENTS_VARIABLE]))
            made.started()
        assert made.timeline.spans == []

    def test_lost_spans_are_an_error_when_they_are_to_be_saved(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError), recording(tmp_path / "trace.json") as made:
            Path(os.environ[timeline.EVENTS_VARIABLE]).unlink()
            made.started()


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
