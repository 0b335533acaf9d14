"""Random workloads on vLLM's real scheduler and connector; COLDSTART_WORKLOADS sets their number."""

import os
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import Request

from coldstart.vllm.scheduling.scheduler import PolicyScheduler
from tests.support.scheduling.engine_double import BLOCK, EngineDouble, Shape, build, expected, make_request
from tests.support.scheduling.workloads import Checked, parallelize, random_load

WORKLOADS = int(os.environ.get("COLDSTART_WORKLOADS", "60"))
PARALLEL_WORKLOADS = int(os.environ.get("COLDSTART_WORKLOADS", "24"))
FIRST = int(os.environ.get("COLDSTART_FIRST_WORKLOAD", "0"))


def checked(seed: int, *, stages: int = 1, tensor: int = 1, **change: int) -> Checked:
    load = replace(random_load(seed), **change)
    try:
        return Checked(parallelize(load, seed, stages=stages, tensor=tensor), seed).run()
    except Exception as problem:
        raise AssertionError(f"workload {seed}: {type(problem).__name__}: {problem}") from problem


@pytest.mark.parametrize("chunk", range(10))
def test_random_workloads_keep_every_invariant(chunk: int) -> None:
    for seed in range(FIRST + chunk, FIRST + WORKLOADS, 10):
        checked(seed)


@pytest.mark.parametrize("change", [{"adapters": 1}, {"pause": 20}])
def test_random_workloads_within_vllms_limits_end(change: dict[str, int]) -> None:
    for seed in range(FIRST, FIRST + PARALLEL_WORKLOADS):
        checked(seed, **change)


@pytest.mark.parametrize(("threshold", "adaptive", "limit"), [(0, False, 32), (4, False, 4), (3, True, 5)])
def test_prompts_fill_an_iteration_as_in_vllm(threshold: int, adaptive: bool, limit: int) -> None:
    shape, totals = Shape(batch=6, blocks=200), list[list[int]]()
    for cls in (AsyncScheduler, PolicyScheduler):
        scheduler = build(shape, cls)
        scheduler.scheduler_config.long_prefill_token_threshold = threshold
        scheduler.adaptive_long_prefill_threshold = adaptive
        engine = EngineDouble(scheduler, shape)
        engine.add(make_request("caches", [7] * 20, 1))
        while scheduler.has_requests():
            engine.step()
        for number in range(6):
            engine.add(make_request(f"r{number}", [7] * 20 + [number] * 9, 2))
        totals.append([engine.step().total_num_scheduled_tokens for _ in range(3)])
    assert totals[0] == totals[1] and scheduler.view.compute_chunk_limit(running=6) == limit


def test_starvation_is_bounded_by_alpha() -> None:
    shape = Shape(batch=1, blocks=200, settings={"alpha_s": 0.5, "mlfq": "paper"})
    engine = EngineDouble(build(shape, PolicyScheduler), shape)
    engine.add(make_request("long", [5] * 60, 60))
    served, now = [0.0], 0
    while "long" in engine.scheduler.requests:
        if now % 3 == 0:
            engine.add(make_request(f"s{now}", [now % 900, 7], 3))
        output = engine.step()
        now += 1
        if "long" in output.num_scheduled_tokens:
            served.append(engine.now)
        waiting = len(engine.scheduler.requests)
        assert engine.now - served[-1] < 0.5 + 0.05 * (waiting + 1), "starved beyond alpha and Q1's length"


def test_stop_tokens_end_a_request() -> None:
    shape, prompt = Shape(), [9, 8, 7]
    engine = EngineDouble(build(shape, PolicyScheduler), shape)
    wanted = expected(prompt, 5)
    params = SamplingParams(max_tokens=50, stop_token_ids=[wanted[3]], temperature=0.0)
    hasher = get_request_block_hasher(BLOCK, sha256)
    engine.add(Request("stops", prompt, params, None, block_hasher=hasher))
    while engine.scheduler.has_requests():
        engine.step()
    assert engine.outputs["stops"] == wanted[:4]


def test_a_request_waits_for_its_grammar_and_lets_others_pass() -> None:
    shape = Shape(batch=1)
    scheduler = build(shape, PolicyScheduler)
    engine = EngineDouble(scheduler, shape)
    waits, passes = make_request("waits", [4, 4], 4), make_request("passes", [6, 6], 4)
    waits.structured_output_request = SimpleNamespace(grammar=None)
    waits.status = waits.status.__class__.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    engine.add(waits)
    engine.add(passes)
    while "passes" in scheduler.requests:
        engine.step()
    assert engine.outputs == {"waits": [], "passes": expected([6, 6], 4)}
    scheduler.finish_requests("waits", waits.status.__class__.FINISHED_ABORTED)
    assert not scheduler.jobs


def test_a_session_that_waits_for_input_is_not_parked() -> None:
    scheduler, session = build(Shape(), PolicyScheduler), make_request("session", [4, 4], 2)
    engine = EngineDouble(scheduler, Shape())
    session.resumable = True
    engine.add(session)
    for _ in range(6):
        engine.step()
        # vLLM would lose it, if its turn ended after an eviction.
        assert not session.num_output_placeholders or session not in scheduler.view.list_evictable()
    assert session.status.name == "WAITING_FOR_STREAMING_REQ" and not list(scheduler.started)


def test_no_decision_is_made_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(batch=2, blocks=200, settings={"alpha_s": 100.0})
    scheduler: Any = build(shape, PolicyScheduler)
    engine, decided, decide = EngineDouble(scheduler, shape), [], scheduler.placement.decide
    monkeypatch.setattr(scheduler.placement, "decide", lambda now: decided.append(now) or decide(now))
    for number in range(4):
        engine.add(make_request(f"r{number}", [number + 1, 5], 60))
    steps = 0
    while scheduler.has_requests():
        engine.step()
        steps += 1
    # Each request may start, end a quantum, end, and have its last token in flight: nothing changes in other steps.
    assert 0 < len(decided) <= scheduler.counters.demotions + 4 * 4 < steps
    assert {name: len(tokens) for name, tokens in engine.outputs.items()} == {f"r{n}": 60 for n in range(4)}


@pytest.mark.parametrize(("stages", "tensor"), [(2, 1), (1, 2), (3, 2)])
def test_random_workloads_on_ranks_keep_every_invariant(stages: int, tensor: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + PARALLEL_WORKLOADS):
        run = checked(seed, stages=stages, tensor=tensor)
        counters = run.scheduler.counters
        seen.update(evicted=counters.blocks_evicted, loads=counters.loads, full=run.engine.most >= stages)
    assert min(seen[what] for what in ("evicted", "loads", "full")) > 0, seen


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
