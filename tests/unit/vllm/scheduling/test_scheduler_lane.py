"""What an operator sees of the express lane: its counters, why a request passed, and the hints that requests carry."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from coldstart.scheduling.express.lengths import Expected
from coldstart.vllm.scheduling import counters as counted
from coldstart.vllm.scheduling.counters import Counters, Exporter, LaneCounters
from coldstart.vllm.scheduling.lane import LaneScheduler
from tests.support.scheduling.engine_double import BLOCK, EngineDouble, Shape, build, make_request

LANE = {"policy": "express", "price": 0.3, "trust": 4, "margin": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model") / "tiny-opt"


class Watching:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []

    def note(self, name: str, start_s: float | None = None, **args: object) -> None:
        self.events.append((name, args))


def engine(folder: Path, **settings: object) -> EngineDouble:
    shape = Shape(slots=8, batch=2, blocks=200, settings=LANE | settings)
    return EngineDouble(build(folder, shape, LaneScheduler), shape)


def drain(double: EngineDouble) -> None:
    while double.scheduler.has_requests():
        double.step()


def heavy(double: EngineDouble) -> None:
    """Eight requests to learn from, then short ones behind two long ones."""
    for number in range(8):
        double.add(make_request(f"seen{number}", [number, 5], 2 if number % 4 else 60))
    drain(double)
    for number in range(10):
        double.add(make_request(f"late{number}", [number, 6], 2 if number > 1 else 90))
        double.step()
    drain(double)


def test_the_counters_say_what_the_ledger_says(folder: Path) -> None:
    double = engine(folder)
    heavy(double)
    scheduler = double.scheduler
    scheduler.counters.read(scheduler.policy, scheduler.lane)
    found, ledger = scheduler.counters, scheduler.policy.ledger
    assert found.passes > 0 and found.passes_kept <= found.passes and found.passes_foretold > 0
    assert (found.lane_s, found.crowded_s, found.balance_s) == (
        ledger.taken_s,
        ledger.crowded_s,
        ledger.balance,
    )
    assert 0 < found.lane_s < found.crowded_s and found.honesty == ledger.honesty.share and found.in_lane == 0


def test_why_a_request_passed_is_noted_where_somebody_watches(folder: Path) -> None:
    double = engine(folder)
    double.scheduler.policy.observer = watching = Watching()
    heavy(double)
    passes = [args for name, args in watching.events if name == "pass"]
    assert len(passes) == double.scheduler.policy.totals.passes > 0
    assert all(one["index"] > one["threshold"] and str(one["request"]).startswith("late") for one in passes)  # type: ignore[operator]


@pytest.mark.parametrize("explain", [False, True])
def test_only_who_was_asked_to_explain_does(
    explain: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLDSTART_TIMELINE_EVENTS", str(tmp_path / "events"))
    assert (engine(folder, explain=explain).scheduler.policy.observer is not None) == explain


def test_a_guess_and_a_class_reach_the_policy(folder: Path) -> None:
    double = engine(folder, classes=["max-tokens"])
    params = SamplingParams(max_tokens=12, ignore_eos=True, extra_args={"expected_output_tokens": 7})
    double.add(Request("guess", [1, 2], params, None, block_hasher=get_request_block_hasher(BLOCK, sha256)))
    (job,) = double.scheduler.policy
    assert job.expected == 7 and job.kind == (None, None, 4)
    drain(double)
    assert Expected((None, None, 4), 3) in double.scheduler.policy.lengths.classes


def test_each_scheduler_exports_its_own_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def gauges(kind: type[Any]) -> dict[str, Any]:
        made.extend(field.name for field in fields(kind))
        return {}

    monkeypatch.setattr(counted, "_make_gauges", gauges)
    assert not Exporter(LaneCounters, {}).enabled and not made
    assert Exporter(LaneCounters, {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}).enabled
    assert "honesty" in made and "demotions" not in made and "blocks_loaded" in made
    made.clear()
    assert Exporter(Counters, {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}).enabled
    assert "demotions" in made and "honesty" not in made


def test_only_counters_that_have_changed_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, float]] = []

    class Gauge:
        def __init__(self, name: str) -> None:
            self.name = name

        def set(self, value: float) -> None:
            written.append((self.name, value))

    monkeypatch.setattr(
        counted, "_make_gauges", lambda kind: {field.name: Gauge(field.name) for field in fields(kind)}
    )
    exporter = Exporter(LaneCounters, {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)})
    exporter.publish(LaneCounters())
    assert {name for name, _ in written} == {field.name for field in fields(LaneCounters)}
    written.clear()
    exporter.publish(LaneCounters(passes=3))
    exporter.publish(LaneCounters(passes=3))
    exporter.publish(LaneCounters())
    assert written == [("passes", 3), ("passes", 0)]
