"""The simulated server: times of small loads by hand, and invariants of random ones."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tools.examples import examples

from coldstart.lab.engine import EngineSimulator
from coldstart.lab.traces import TraceRequest
from coldstart.scheduling.profile import IterationProfile
from coldstart.scheduling.settings import STRATEGIES, SchedulerSettings
from coldstart.vllm.scheduling.virtual_engine import EngineResources

PROFILE = IterationProfile.create([(1, 0.01), (100, 0.02), (1000, 0.2)], [(1, 0.01), (8, 0.012)])


def simulate(rows: list[TraceRequest], policy: str = "fcfs", **given: object) -> EngineSimulator:
    own = {name: given.pop(name) for name in ("batch", "strategy", "oldest_share") if name in given}
    settings = SchedulerSettings(policy, **{"alpha_s": 5.0, "batch": 16, **own})  # type: ignore[arg-type]
    resources = EngineResources(**{"context_s": 0.0, "device_blocks": 999, **given})  # type: ignore[arg-type]
    simulator = EngineSimulator(PROFILE, settings, resources)
    simulator.run(rows)
    return simulator


def test_fcfs_runs_to_completion_and_mlfq_lets_the_short_pass() -> None:
    rows = [TraceRequest(0.0, 10, 500), TraceRequest(0.1, 10, 2)]
    fcfs, mlfq = (simulate(rows, name, batch=1).records for name in ("fcfs", "skip-join-mlfq"))
    assert fcfs[0].finished_s < fcfs[1].finished_s  # type: ignore[operator]
    assert mlfq[1].finished_s < 0.2  # type: ignore[operator]


def test_deadline_lets_a_short_prompt_pass_a_long_one_but_not_for_ever() -> None:
    long, now = TraceRequest(0.01, 900, 1), 0.01
    rows = [TraceRequest(0.0, 900, 1), long]
    while now < 15.0:
        rows.append(TraceRequest(now := now + 0.0101, 1, 1))
    runs = [simulate(rows, name, batch=1, iterations_in_flight=1) for name in ("fcfs", "deadline")]
    fcfs, deadline = (run.records for run in runs)
    latest = 0.01 + SchedulerSettings().factor * 0.18 + 1.0
    assert fcfs[1].first_token_s < 1.0 < deadline[1].first_token_s < latest  # type: ignore[operator]
    assert deadline[2].ttft_s < fcfs[2].ttft_s  # type: ignore[operator]


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 63 KV blocks, but the device has 10"):
        simulate([TraceRequest(0.0, 1000, 1)], device_blocks=10)


def test_equal_hash_ids_share_their_prefix() -> None:
    shared = [TraceRequest(float(number), 1024, 1, None, (3, 4)) for number in range(2)]
    first, second = simulate(shared).records
    assert first.ttft_s == pytest.approx(0.2, rel=0.1) and second.ttft_s == pytest.approx(0.01, rel=0.2)


@examples(100)
@example(
    load=[(0.0625, 1), (0.140625, 1), (0.002, 15), (0.16, 48), (0.199, 29), (0.0625, 60), (0.0273, 33), (0.0977, 46),
          (0.109, 60), (0.16, 43), (0.0547, 3), (0.14, 60), (0.0859, 8), (0.14, 7), (0.199, 36), (0.168, 40), (0.125, 8),
          (0.0625, 3), (0.0195, 7), (0.0039, 2), (0.0039, 5), (0.0156, 5)],
    batch=3,
)  # fmt: skip
@given(
    st.lists(st.tuples(st.floats(0.001, 0.2), st.integers(1, 60)), min_size=1, max_size=40), st.integers(1, 4)
)
def test_an_oldest_share_bounds_every_latency(load: list[tuple[float, int]], batch: int) -> None:
    """With half of the time and one request at a time, a latency is at most twice that of FCFS.

    With several slots, some may be empty beside a long request at the end. This can happen before an arrival and after it.
    Each time it costs at most 1 - 1/batch of the longest older request (Graham's bound on list schedules), doubled.
    """
    step_s, now, rows = 0.01, 0.0, []
    flat = IterationProfile.create([(1, step_s), (2, step_s)], [(1, step_s), (2, step_s)])
    for gap, output in load:
        now += gap
        rows.append(TraceRequest(now, 1, output))

    def latencies(policy: str, share: float) -> list[float]:
        settings = SchedulerSettings(policy, batch=batch, oldest_share=share, mlfq="paper")
        machine = EngineResources(iterations_in_flight=1, context_s=0.0, device_blocks=999)
        return [one.latency_s for one in EngineSimulator(flat, settings, machine).run(rows)]  # type: ignore[misc]

    both = zip(latencies("skip-join-mlfq", 0.5), latencies("fcfs", 0.0), strict=True)
    for number, (ours, fcfs) in enumerate(both, 1):
        longest_s = step_s * max(output for _, output in load[:number])
        assert ours <= 2 * fcfs + 2 * step_s + 4 * (1 - 1 / batch) * longest_s + 1e-9


LOADS = st.lists(
    st.tuples(st.floats(0, 0.2), st.integers(1, 300), st.integers(1, 60)), min_size=1, max_size=25
)


@examples(100)
@given(
    LOADS,
    st.sampled_from(["fcfs", "skip-join-mlfq", "deadline"]),
    st.sampled_from(STRATEGIES),
    st.sampled_from([24, 40, 80, 999]),
    st.sampled_from([0, 30, 999]),
    st.sampled_from([2048, 64]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([1, 2]),
)
def test_every_load_ends_with_every_token(
    load: list[tuple[float, int, int]],
    policy: str,
    strategy: str,
    device: int,
    host: int,
    budget: int,
    oldest: float,
    depth: int,
) -> None:
    now, rows = 0.0, []
    for gap, prompt, output in load:
        now += gap
        rows.append(TraceRequest(now, prompt, output))
    simulator = simulate(
        rows,
        policy,
        batch=4,
        strategy=strategy,
        device_blocks=device,
        host_blocks=host,
        token_budget=budget,
        oldest_share=oldest,
        iterations_in_flight=depth,
        link_bytes_s=1e9,
    )
    for record, row in zip(simulator.records, rows, strict=True):
        assert record.ok and record.output_tokens == row.output_tokens
        assert record.due_s < record.first_token_s <= record.finished_s  # type: ignore[operator]


def test_requests_that_fill_the_device_end() -> None:
    rows = [TraceRequest(0.0, prompt, 10) for prompt in (30, 38, 9, 30, 17)]
    simulate(rows, "skip-join-mlfq", batch=4, device_blocks=3, strategy="recompute")
