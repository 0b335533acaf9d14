"""The simulated engine's invariants over random loads, and its decisions on small ones."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tools.examples import examples

from coldstart.lab.replay import build_records
from coldstart.lab.scheduling import COPIES, Outcome, SimSettings, simulate
from coldstart.lab.traces import TraceRequest
from coldstart.scheduling import POLICIES, STRATEGIES, IterationProfile, SchedulerSettings

PROFILE = IterationProfile.create([(1, 0.01), (100, 0.02), (1000, 0.2)], [(1, 0.01), (8, 0.012)])


def run(rows: list[TraceRequest], policy: str = "fcfs", **given: object) -> Outcome:
    own = {name: given.pop(name) for name in ("batch", "strategy", "oldest_share") if name in given}
    settings = SchedulerSettings(policy, **{"alpha_s": 5.0, "batch": 16, **own})  # type: ignore[arg-type]
    return simulate(rows, PROFILE, settings, SimSettings(**{"context_s": 0.0, **given}))  # type: ignore[arg-type]


def test_one_job_takes_its_iterations() -> None:
    job = run([TraceRequest(1.0, 100, 5)]).jobs[0]
    assert job.first_token_s == pytest.approx(1.02)
    assert job.finished_s == pytest.approx(1.02 + 4 * 0.01)


def test_fcfs_runs_to_completion_and_mlfq_lets_the_short_pass() -> None:
    rows = [TraceRequest(0.0, 10, 500), TraceRequest(0.1, 10, 2)]
    ends = {
        name: [job.finished_s for job in run(rows, name, batch=1).jobs] for name in ("fcfs", "skip-join-mlfq")
    }
    assert ends["fcfs"][0] < ends["fcfs"][1]  # type: ignore[operator]
    assert ends["skip-join-mlfq"][1] < 0.2  # type: ignore[operator]


def test_a_token_budget_cuts_a_long_prompt_into_chunks() -> None:
    outcome = run([TraceRequest(0.0, 1000, 1)], token_budget=100)
    assert outcome.iterations == 10


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="more KV blocks"):
        run([TraceRequest(0.0, 1000, 1)], device_blocks=10)


def test_write_through_frees_at_once_and_a_slow_link_takes_time() -> None:
    rows = [TraceRequest(0.0, 300, 200), *(TraceRequest(0.5, 200, 3) for _ in range(4))]
    kwargs = {"batch": 2, "device_blocks": 36, "link_bytes_s": 1e8, "policy": "skip-join-mlfq"}
    fast = run(rows, **kwargs)  # type: ignore[arg-type]
    for copies in ("beside", "blocking"):
        slow = run(rows, copies=copies, **kwargs)  # type: ignore[arg-type]
        assert slow.blocks_out and fast.blocks_out
        assert slow.finished_s > fast.finished_s


def test_copy_wait_and_memory_wait_are_distinguished() -> None:
    def waited(link_bytes_s: float) -> tuple[float, float]:
        rows = [TraceRequest(0.1 * number, 100, 60) for number in range(24)]
        outcome = run(rows, "skip-join-mlfq", batch=4, device_blocks=40, link_bytes_s=link_bytes_s)
        jobs = outcome.jobs
        return sum(job.swapping_s for job in jobs), sum(job.displaced_s for job in jobs)

    slow, fast = waited(1e8), waited(1e15)
    assert fast[0] < slow[0] and fast[1] > 0 and slow[1] > 0


@examples(300)
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
    """With half of the time and one job at a time, a latency is at most twice that of FCFS.

    With several slots, some may be empty beside a long job at the end. This can happen before an arrival and after it.
    Each time it costs at most 1 - 1/batch of the longest older job (Graham's bound on list schedules), doubled.
    """
    step_s, now, rows = 0.01, 0.0, []
    flat = IterationProfile.create([(1, step_s), (2, step_s)], [(1, step_s), (2, step_s)])
    for gap, output in load:
        now += gap
        rows.append(TraceRequest(now, 1, output))

    def latencies(policy: str, share: float) -> list[float]:
        told = SchedulerSettings(policy, batch=batch, oldest_share=share, alpha_scale=0.0, promoted_cap=None)
        outcome = simulate(rows, flat, told, SimSettings(depth=1, context_s=0.0))
        return [job.finished_s - job.job.arrival_s for job in outcome.jobs]  # type: ignore[operator]

    both = zip(latencies("skip-join-mlfq", 0.5), latencies("fcfs", 0.0), strict=True)
    for number, (ours, fcfs) in enumerate(both, 1):
        longest_s = step_s * max(output for _, output in load[:number])
        assert ours <= 2 * fcfs + 2 * step_s + 4 * (1 - 1 / batch) * longest_s + 1e-9


LOADS = st.lists(
    st.tuples(st.floats(0, 0.2), st.integers(1, 300), st.integers(1, 60)), min_size=1, max_size=25
)


@examples(300)
@given(
    LOADS,
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from(STRATEGIES),
    st.sampled_from([None, 23, 40, 80]),
    st.sampled_from([None, 0, 30]),
    st.sampled_from([2048, 64]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from(COPIES),
    st.sampled_from([1, 2]),
)
def test_every_load_ends_with_every_token(
    load: list[tuple[float, int, int]],
    policy: str,
    strategy: str,
    device: int | None,
    host: int | None,
    budget: int,
    oldest: float,
    copies: str,
    depth: int,
) -> None:
    now, rows = 0.0, []
    for gap, prompt, output in load:
        now += gap
        rows.append(TraceRequest(now, prompt, output))
    outcome = run(
        rows,
        policy,
        batch=4,
        strategy=strategy,
        device_blocks=device,
        host_blocks=host,
        token_budget=budget,
        oldest_share=oldest,
        copies=copies,
        depth=depth,
        link_bytes_s=1e9,
    )
    assert len(outcome.jobs) == len(rows)
    assert device is None or outcome.peak_blocks <= device
    for job, record in zip(outcome.jobs, build_records(outcome), strict=True):
        assert job.delivered == job.output and record.ok
        assert job.blocks == 0
        latency = record.latency_s
        assert latency is not None and job.executing_s + job.swapping_s + job.displaced_s <= latency + 1e-6
    assert outcome.finished_s == max(job.finished_s or 0 for job in outcome.jobs)


def test_loaded_request_does_not_use_blocks_of_a_pending_prefill() -> None:
    """Chosen and then refused by the step, it would be chosen for ever."""
    load = [
        (0.0, 294, 13),
        (0.03125, 73, 59),
        (0.16796875, 136, 42),
        (0.16796875, 69, 50),
        (0.35546875, 1, 1),
    ]
    load += [(0.35546875, 1, 1)] * 4 + [(0.48046875, 241, 24), (0.48046875, 1, 17), (0.48046875, 97, 27)]
    load += [(0.57421875, 1, 1), (0.66796875, 144, 5)]
    outcome = run(
        [TraceRequest(*row) for row in load], "srpt", batch=4, strategy="proactive", device_blocks=40,
        token_budget=64, oldest_share=0.5, copies="blocking", depth=1, link_bytes_s=1e9,
    )  # fmt: skip
    assert all(job.delivered == job.output for job in outcome.jobs)


def test_equals_that_take_turns_do_not_move_their_kv_at_every_turn() -> None:
    rows = [TraceRequest(0.0, 100, 100) for _ in range(6)]
    outcome = run(rows, "skip-join-mlfq", batch=4, device_blocks=30, strategy="recompute")
    assert outcome.recomputed_tokens < 6 * 200 * 6


def test_two_orders_do_not_take_each_others_memory_before_there_is_a_token() -> None:
    load = [
        (0.0, 300, 60),
        (0.146, 300, 5),
        (0.146, 216, 5),
        (0.146, 84, 24),
        (0.146, 163, 5),
        (0.239, 162, 5),
    ]
    outcome = run(
        [TraceRequest(*row) for row in load],
        "srpt",
        batch=4,
        device_blocks=23,
        strategy="recompute",
        token_budget=64,
        oldest_share=0.5,
        link_bytes_s=1e9,
    )
    assert [job.delivered for job in outcome.jobs] == [output for _, _, output in load]
