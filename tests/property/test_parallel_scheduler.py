"""The scheduler with tensor and pipeline parallelism, on vLLM's real scheduler, connector and aggregator.

Each rank has separate KV and copies. A pipeline schedules its next batch before the earlier ones return, without and with
asynchronous scheduling. COLDSTART_WORKLOADS sets the number of random workloads.
"""

import os
from collections import Counter

import pytest
from vllm.v1.request import Request

from coldstart.vllm.scheduling.scheduler import PolicyScheduler
from tests.support.scheduling.engine_double import EngineDouble, Shape, build, make_request
from tests.support.scheduling.workloads import Checked, parallelize, random_load

WORKLOADS = int(os.environ.get("COLDSTART_WORKLOADS", "24"))
FIRST = int(os.environ.get("COLDSTART_FIRST_WORKLOAD", "0"))


def checked(seed: int, *, stages: int = 1, tensor: int = 1) -> Checked:
    return Checked(parallelize(random_load(seed), seed, stages=stages, tensor=tensor), seed).run()


@pytest.mark.parametrize(("stages", "tensor"), [(2, 1), (1, 2), (3, 2)])
def test_random_workloads_keep_every_invariant(stages: int, tensor: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + WORKLOADS):
        try:
            run = checked(seed, stages=stages, tensor=tensor)
        except Exception as problem:
            raise AssertionError(f"workload {seed}: {type(problem).__name__}: {problem}") from problem
        counters = run.scheduler.counters
        seen.update(evictions=counters.evictions, loads=counters.loads, full=run.engine.most >= stages)
    assert min(seen[what] for what in ("evictions", "loads", "full")) > 0, seen


def test_the_highest_pending_requests_fill_the_next_batch() -> None:
    """FastServe, 4.3: requests in progress retain their slots, and the free stage takes the next requests in order."""
    shape = Shape(slots=8, batch=2, blocks=200, depth=2, stages=2, settings={"alpha_s": 100.0})
    engine = EngineDouble(build(shape, PolicyScheduler), shape)
    for number in range(6):
        engine.add(make_request(f"r{number}", [number + 1, 5], 12))
    batches = [set(engine.step().num_scheduled_tokens) for _ in range(2)]
    assert batches == [{"r0", "r1"}, {"r2", "r3"}]
    counters = engine.scheduler.counters
    assert counters.parks == 0, "a request in progress was parked"
    while engine.scheduler.has_requests():
        before = engine.pending_requests()
        assert not before.intersection(engine.step().num_scheduled_tokens)
    assert counters.parks > 0 and {len(tokens) for tokens in engine.outputs.values()} == {12}


def test_a_request_without_a_pipeline_is_never_in_flight() -> None:
    shape = Shape(depth=2)
    engine = EngineDouble(build(shape, PolicyScheduler), shape)
    request: Request = make_request("one", [1, 2], 9)
    engine.add(request)
    for _ in range(4):
        engine.step()
        assert not engine.scheduler.is_in_flight(request)
