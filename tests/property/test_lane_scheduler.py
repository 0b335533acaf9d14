"""The express lane on vLLM's real scheduler and connector; COLDSTART_WORKLOADS asks for more of the random workloads."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import Request, RequestStatus

from coldstart.vllm.scheduling.lane import LaneScheduler
from tests.support.scheduling.engine_double import EngineDouble, Shape, build, expected, make_request
from tests.support.scheduling.lane_workloads import (
    LaneChecked,
    lane_load,
    of_one_length,
    steps_of,
    without_price,
)

WORKLOADS = int(os.environ.get("COLDSTART_WORKLOADS", "60"))
FIRST = int(os.environ.get("COLDSTART_FIRST_WORKLOAD", "0"))


@pytest.mark.parametrize("chunk", range(10))
def test_random_workloads_keep_every_invariant(chunk: int, model_folder: Path) -> None:
    for seed in range(FIRST + chunk, FIRST + WORKLOADS, 10):
        try:
            LaneChecked(model_folder, lane_load(seed), seed).run()
        except Exception as problem:
            raise AssertionError(f"workload {seed}: {type(problem).__name__}: {problem}") from problem


def test_the_workloads_pass_park_evict_and_load(model_folder: Path) -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        run = LaneChecked(model_folder, lane_load(seed), seed).run()
        totals, counters = run.scheduler.policy.totals, run.scheduler.counters
        seen.update(
            passes=totals.passes, parked=totals.parked, evictions=counters.evictions, loads=counters.loads
        )
    assert min(seen[what] for what in ("passes", "parked", "evictions", "loads")) > 0, seen


@pytest.mark.parametrize("seed", range(8))
def test_without_a_price_the_schedule_is_that_of_vllms_own_scheduler(seed: int, model_folder: Path) -> None:
    load = without_price(lane_load(seed))
    ours = steps_of(model_folder, load, seed, LaneScheduler)
    assert ours == steps_of(model_folder, load, seed, AsyncScheduler)


@pytest.mark.parametrize("seed", range(3))
def test_constant_lengths_have_the_schedule_of_vllms_own_scheduler(seed: int, model_folder: Path) -> None:
    load = of_one_length(seed)
    ours = steps_of(model_folder, load, seed, LaneScheduler)
    assert ours == steps_of(model_folder, load, seed, AsyncScheduler)


class Shows(LaneScheduler):
    """Shows vLLM the parked requests as well."""

    def _take(self, turn, throttle_prefills):  # type: ignore[no-untyped-def]
        turn.running += self.lane.hidden()
        return super()._take(turn, throttle_prefills)


class Queues(LaneScheduler):
    """Puts an evicted request where vLLM puts it."""

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self.line.remove(request)
        self.line.appendleft(request)


class Forgets(LaneScheduler):
    """Does not tell the lane who has begun."""

    def _began(self, admitted: list[Request]) -> None:
        pass


@pytest.mark.parametrize("mutant", [Shows, Queues, Forgets])
def test_a_broken_adapter_is_caught(mutant: type[LaneScheduler], model_folder: Path) -> None:
    for seed in range(200):
        try:
            LaneChecked(model_folder, lane_load(seed), seed, mutant).run()
        except Exception:  # noqa: BLE001 - whatever goes wrong is a failure
            return
    pytest.fail(f"{mutant.__name__} was not noticed")


def test_a_short_request_passes_a_long_one_and_the_answers_stay(model_folder: Path) -> None:
    settings = {"policy": "express", "price": 0.3, "trust": 4, "margin": 1.0}
    shape = Shape(slots=8, batch=2, blocks=200, settings=settings)
    engine = EngineDouble(build(model_folder, shape, LaneScheduler), shape)
    for number in range(8):
        engine.add(make_request(f"seen{number}", [number, 5], 2 if number % 4 else 60))
    while engine.scheduler.has_requests():
        engine.step()
    for name in ("long", "too long"):
        engine.add(make_request(name, [len(name)] * 40, 150))
    for _ in range(60):
        engine.step()
    engine.add(make_request("short", [2, 3], 2))
    while len(engine.outputs["short"]) < 2:
        engine.step()
    assert len(engine.outputs["long"]) < 150 and engine.scheduler.policy.totals.passes > 0
    while engine.scheduler.has_requests():
        engine.step()
    assert engine.outputs["long"] == expected([4] * 40, 150)
    assert engine.outputs["short"] == expected([2, 3], 2)


def test_an_aborted_request_teaches_no_length(model_folder: Path) -> None:
    shape = Shape(settings={"policy": "express"})
    scheduler = build(model_folder, shape, LaneScheduler)
    engine = EngineDouble(scheduler, shape)
    engine.add(make_request("cut", [1, 2], 40))
    for _ in range(5):
        engine.step()
    scheduler.finish_requests("cut", RequestStatus.FINISHED_ABORTED)
    assert scheduler.policy.lengths.all.seen == 0 and not scheduler.jobs
