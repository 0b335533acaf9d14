"""The plan passes between processes unchanged, and a start is recorded."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from coldstart.artifacts.bundle import TrustResult
from hypothesis import given
from hypothesis import strategies as st
from tools.bundles import key

from coldstart.contract.arguments import Arguments
from coldstart.contract.environment import TIMELINE_EVENTS
from coldstart.contract.fallback import Fallback
from coldstart.contract.graphs import EngineTask
from coldstart.contract.plan import LaunchPlan
from coldstart.contract.weights import WeightsRequest
from coldstart.errors import CommandFailedError, UsageError
from coldstart.launch import planning, preparation
from coldstart.launch.planning import ServeRequest
from coldstart.models import resolution
from coldstart.models.inspection import BundleLookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system import recording, runtime, timeline
from coldstart.system.devices import nvml
from coldstart.system.paths import Cache
from coldstart.system.recording import record_timeline
from coldstart.vllm.engine import template

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


@pytest.fixture
def no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TIMELINE_EVENTS, raising=False)
    # CLOCK_MONOTONIC does not count the time for which the machine was suspended.
    monkeypatch.setattr(recording, "now", lambda: timeline.now() - 1e9)


@pytest.mark.usefixtures("no_events")
class TestRecording:
    def test_spans_of_this_and_other_processes_are_saved(self, tmp_path: Path) -> None:
        with record_timeline(tmp_path / "trace.json") as made:
            timeline.emit_span("here", 1.0, 2.0, track="t")
            child = "from coldstart.system import timeline; timeline.emit_span('there', 2, 3, track='t')"
            subprocess.run([sys.executable, "-c", child], check=True)
        assert [span.name for span in made.timeline.spans] == ["coldstart", "here", "there"]
        saved = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert {"coldstart", "here", "there"} <= {event["name"] for event in saved}

    def test_spans_of_a_ready_server_are_saved_at_its_end(self, tmp_path: Path) -> None:
        file = tmp_path / "trace.json"
        with record_timeline(file) as made:
            made.save_start()
            assert "swap in" not in file.read_text()
            timeline.emit_span("swap in", 1.0, 2.0, track="scheduler")
        assert "swap in" in file.read_text()

    @pytest.mark.parametrize(
        "damage", [lambda events: events.unlink(), lambda events: events.write_text("{")]
    )
    def test_ready_server_is_kept_when_its_spans_are_lost(self, damage: Callable[[Path], object]) -> None:
        with record_timeline() as made:
            damage(Path(os.environ[TIMELINE_EVENTS]))
            made.save_start()
        assert made.timeline.spans == []

    def test_lost_spans_are_an_error_when_they_are_to_be_saved(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError), record_timeline(tmp_path / "trace.json") as made:
            Path(os.environ[TIMELINE_EVENTS]).unlink()
            made.save_start()


PLANNED = LaunchPlan(["planned"])


class _Bundle:
    ref = name = "made@sha256:0"
    version = 1


@pytest.fixture
def lookup(model: ResolvedModel, home: Path, monkeypatch: pytest.MonkeyPatch) -> BundleLookup:
    monkeypatch.setattr(resolution, "ensure_weights", lambda model, offline: model)
    monkeypatch.setattr(planning.prepare, "plan_with_bundle", lambda *arguments, **options: PLANNED)
    return BundleLookup(model, Arguments(), Cache.at(), key(), cast(Any, _Bundle()))


def test_plan_refuses_a_bundle_without_a_trusted_signature(lookup: BundleLookup) -> None:
    refuse = lambda bundle: TrustResult(False, None, "it carries no signature")  # noqa: E731 - one line
    with pytest.raises(CommandFailedError, match="no signature") as caught:
        planning.plan(ServeRequest(lookup, require_signature=True, trust=refuse))
    assert "coldstart trust add" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--api-server-count", "2"], ["--api-server-count"]),
        (["-asc", "4", "--grpc-port", "9000"], ["--api-server-count", "--grpc-port"]),
        (["--grpc"], ["--grpc"]),
        (["--api-server-count", "1", "--no-grpc", "--seed", "3"], []),
        (["--api-server-count=0"], []),
        ([], []),
    ],
)
def test_ignored_flags_are_named(words: list[str], named: list[str]) -> None:
    said = planning.list_ineffective_flags(Arguments(words))
    assert [line.reason.split()[0] for line in said] == named
    assert all(line.stage == "server" and "has no effect: " in line.reason for line in said)


SLEEPS = "--enable-sleep-mode"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "targets_cpu", lambda: False)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("driver", "level", "arguments", "reason", "hint"),
    [
        ("580.1", "engine", [], "CUDA does not survive a fork", "--level runtime"),
        (
            "580.1",
            "asleep-1",
            [],
            "cannot sleep without --enable-sleep-mode",
            "--level asleep-1 -- --enable-sleep",
        ),
        (
            "580.1",
            "parked",
            [],
            "cannot sleep without --enable-sleep-mode",
            "--level parked -- --enable-sleep",
        ),
        (
            "550.54.14",
            "parked",
            [SLEEPS],
            "driver 570 or later, but this driver is 550.54.14",
            "level asleep-1",
        ),
        ("580.1", "parked", [SLEEPS, "--nnodes", "2"], "--nnodes is 2", "omit --nnodes"),
    ],
)
def test_level_that_this_engine_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch, driver: str, level: str, arguments: list[str], reason: str, hint: str
) -> None:
    monkeypatch.setattr(nvml, "read_driver_version", lambda: driver)
    with pytest.raises(UsageError, match=reason) as caught:
        preparation.start_template(level, LaunchPlan(["m", *arguments]), "m", 1.0)
    assert hint in str(caught.value.hint)


@pytest.mark.usefixtures("gpu")
def test_a_built_engine_is_not_forked() -> None:
    with pytest.raises(RuntimeError, match="CUDA contexts do not survive a fork"):
        template.build_template(LaunchPlan([]), "engine")
