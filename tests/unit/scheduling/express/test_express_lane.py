"""The lane on the simulated engine: the order of arrival where nobody may pass, the guarantee, and what memory allows."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st
from tools.examples import examples

from coldstart.scheduling import IterationProfile, SchedulerSettings
from coldstart.scheduling.express.ledger import CREDIT
from coldstart.scheduling.simulate import Engine, Outcome, SimSettings
from coldstart.scheduling.simulate.express import ExpressScheduler
from coldstart.traces import TraceRequest

STEP_S = 0.01
NO_SHRINK = (Phase.explicit, Phase.reuse, Phase.generate)
FLAT = IterationProfile.from_points([(1, STEP_S), (2, STEP_S)], [(1, STEP_S), (2, STEP_S)])
SLOPED = IterationProfile.from_points([(1, 0.01), (100, 0.02), (1000, 0.2)], [(1, 0.01), (8, 0.012)])


def run(rows: list[TraceRequest], profile: IterationProfile = SLOPED, **given: object) -> Engine:
    own = {n: given.pop(n) for n in ("batch", "strategy", "price", "trust", "margin", "policy") if n in given}
    told = SchedulerSettings(**{"policy": "express", "batch": 4, **own})  # type: ignore[arg-type]
    engine = Engine(profile, told, SimSettings(**{"slots": 8, "context_s": 0.0, **given}))  # type: ignore[arg-type]
    engine.run(rows)
    return engine


def lane(engine: Engine) -> ExpressScheduler:
    assert isinstance(engine.scheduler, ExpressScheduler)
    return engine.scheduler


def heavy(count: int, gap_s: float, seed: int = 1) -> list[TraceRequest]:
    random = Random(seed)
    return [TraceRequest(number * gap_s, 20, 10 if random.random() < 0.9 else 400) for number in range(count)]


def latencies(outcome: Outcome) -> list[float]:
    return [(job.finished_s or 0.0) - job.job.arrival_s for job in outcome.jobs]


def counts(outcome: Outcome) -> tuple[object, ...]:
    return outcome.iterations, outcome.served, outcome.evictions, outcome.finished_s, latencies(outcome)


@pytest.mark.parametrize("gap_s", [0.1, 0.3])
def test_constant_lengths_are_served_as_first_come_first_served_iteration_for_iteration(gap_s: float) -> None:
    rows = [TraceRequest(number * gap_s, 20, 100) for number in range(200)]
    ours = run(rows)
    assert lane(ours).policy.lengths.learned and lane(ours).policy.totals.passes == 0
    assert counts(ours.outcome) == counts(run(rows, policy="fcfs").outcome)


@pytest.mark.parametrize("gap_s", [0.05, 0.15])
def test_constant_lengths_are_so_too_where_memory_binds(gap_s: float) -> None:
    # Who is evicted shortly before its end is worth much, and first in line anyway.
    rows = [TraceRequest(number * gap_s, 20, 100) for number in range(200)]
    machine = {"batch": 8, "slots": 16, "device_blocks": 30, "block_tokens": 16}
    ours = run(rows, **machine)
    assert ours.outcome.evictions > 100 and lane(ours).policy.totals.passes == 0
    assert counts(ours.outcome) == counts(run(rows, policy="fcfs", **machine).outcome)


def test_without_a_price_nobody_passes() -> None:
    rows = heavy(200, 0.05)
    ours = run(rows, price=0.0)
    assert counts(ours.outcome) == counts(run(rows, policy="fcfs").outcome)


def test_the_short_ones_pass_where_a_few_are_long_and_the_long_ones_hardly_pay() -> None:
    rows = heavy(300, 0.13)
    ours, fcfs = run(rows, margin=2.0), run(rows, policy="fcfs")
    mine, theirs = latencies(ours.outcome), latencies(fcfs.outcome)
    long = [number for number, row in enumerate(rows) if row.output_tokens == 400]
    assert sum(theirs) > 1.25 * sum(mine)
    assert sum(theirs[n] for n in long) > 0.93 * sum(mine[n] for n in long)
    totals, ledger = lane(ours).policy.totals, lane(ours).policy.ledger
    assert totals.passes > 20 and totals.kept > 0.8 * totals.foretold
    assert ledger.taken_s <= 0.12 * ledger.crowded_s


class Watching:
    """Keeps the events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []

    def note(self, name: str, start_s: float | None = None, **args: object) -> None:
        self.events.append((name, args))


def test_room_is_left_for_the_lane_only_while_somebody_asks_for_it() -> None:
    gauge = lane(run(heavy(50, 0.05), device_blocks=30, block_tokens=16)).lane.gauge
    # A tenth of the pool at most, however much is asked for, and nothing of it later.
    assert [gauge.kept((), asked) for asked in ((), (2,), (2, 9), ())] == [0, 2, 3, 0]


def test_every_pass_is_explained() -> None:
    told = SchedulerSettings("express", batch=4, margin=2.0)
    engine = Engine(SLOPED, told, SimSettings(slots=8, context_s=0.0))
    lane(engine).policy.observer = watching = Watching()
    engine.run(heavy(200, 0.13))
    passes = [args for name, args in watching.events if name == "pass"]
    assert len(passes) == lane(engine).policy.totals.passes > 10
    for args in passes:
        assert args["index"] > args["threshold"] > 0  # type: ignore[operator]
        assert 0.2 <= args["chance"] <= 1 and args["balance_s"] >= 0  # type: ignore[operator]


def hinted(hint: Callable[[int, int], int] | None) -> tuple[list[int], list[float]]:
    """Of a heavy tail on few slots: outputs, and latencies where each has that hint of (number, output)."""
    random = Random(3)
    outputs = [max(1, min(800, round(random.lognormvariate(3, 1.4)))) for _ in range(400)]
    rows = [TraceRequest(0.12 * number, 20, output) for number, output in enumerate(outputs)]
    told = SchedulerSettings("express", batch=4)
    given = None if hint is None else [hint(number, output) for number, output in enumerate(outputs)]
    return outputs, latencies(
        Engine(SLOPED, told, SimSettings(slots=8, context_s=0.0), hints=given).run(rows)
    )


def good_to_a_factor_of_two(number: int, output: int) -> int:
    return output * (1 + number % 2)


def test_a_hint_within_a_factor_of_two_tells_the_short_from_the_long() -> None:
    told, guessed = (
        sum(each / output for output, each in zip(*hinted(hint), strict=True))
        for hint in (good_to_a_factor_of_two, None)
    )
    assert 2.5 * told < guessed


def test_long_requests_that_say_short_gain_nothing_over_the_truth() -> None:
    def lies(number: int, output: int) -> int:
        return 4 if output >= 100 else good_to_a_factor_of_two(number, output)

    honest, lying = (
        sum(each for output, each in zip(*hinted(hint), strict=True) if output >= 100)
        for hint in (good_to_a_factor_of_two, lies)
    )
    assert lying > 0.95 * honest


def test_contexts_that_are_cheap_to_compute_again_are_not_loaded() -> None:
    engine = run(heavy(30, 0.1))
    gauge = lane(engine).lane.gauge
    assert not gauge.worth_loading(50) and gauge.worth_loading(1000)


LOADS = st.lists(st.tuples(st.floats(0, 0.3), st.integers(1, 80)), min_size=1, max_size=50)


@examples(120, phases=NO_SHRINK)
@given(LOADS, st.integers(1, 4), st.sampled_from([0.05, 0.1, 0.3]), st.integers(1, 8))
def test_no_request_waits_longer_than_its_turn_over_one_minus_the_price(
    load: list[tuple[float, int]], batch: int, price: float, trust: int
) -> None:
    # The conditions: iterations that take the same, one token of prompt, memory for everybody.
    now, rows = 0.0, []
    for gap, output in load:
        now += gap
        rows.append(TraceRequest(now, 1, output))
    ours = run(rows, FLAT, batch=batch, price=price, trust=trust, margin=1.0, depth=1, slots=64)
    fcfs = run(rows, FLAT, policy="fcfs", batch=batch, depth=1, slots=64)
    ledger = lane(ours).policy.ledger
    free_s = CREDIT * price * STEP_S + ledger.owed_s
    assert ledger.taken_s <= price * ledger.crowded_s + free_s + 1e-9
    # With several slots, an order differs from another by at most the longest request (Graham).
    uneven_s = (batch - 1) / batch * max(row.output_tokens for row in rows) * STEP_S
    for mine, theirs in zip(latencies(ours.outcome), latencies(fcfs.outcome), strict=True):
        assert mine <= (theirs + uneven_s + free_s) / (1 - price) + 3 * STEP_S


@examples(120, phases=NO_SHRINK)
@given(
    st.lists(st.tuples(st.floats(0, 0.2), st.integers(1, 300), st.integers(1, 60)), min_size=1, max_size=40),
    st.sampled_from([None, 23, 40]),
    st.sampled_from([None, 0, 30]),
    st.sampled_from(["recompute", "proactive"]),
    st.sampled_from([2048, 64]),
    st.sampled_from([1, 2]),
    st.sampled_from(["written-through", "beside", "blocking"]),
)
def test_every_load_ends_with_every_token_and_the_lane_keeps_its_books(
    load: list[tuple[float, int, int]],
    device: int | None,
    host: int | None,
    strategy: str,
    budget: int,
    depth: int,
    copies: str,
) -> None:
    now, rows = 0.0, []
    for gap, prompt, output in load:
        now += gap
        rows.append(TraceRequest(now, prompt, output))
    engine = run(
        rows,
        strategy=strategy,
        device_blocks=device,
        host_blocks=host,
        token_budget=budget,
        depth=depth,
        copies=copies,
        link_bytes_s=1e9,
        trust=2,
        margin=1.0,
        price=0.3,
    )
    assert all(job.delivered == job.output and job.blocks == 0 for job in engine.outcome.jobs)
    found = lane(engine)
    assert device is None or engine.outcome.peak_blocks <= device
    assert not (found.lane.members or found.lane.parked or found.lane.paused or len(found.policy))
    assert not len(found.policy.waiting)
