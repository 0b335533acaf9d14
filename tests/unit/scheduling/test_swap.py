from hypothesis import given
from hypothesis import strategies as st

from coldstart.scheduling.job import Job
from coldstart.scheduling.reserve import ArrivalReserve
from coldstart.scheduling.swap import plan

JOBS = st.lists(st.tuples(st.floats(0, 100), st.integers(1, 20)), max_size=12)


@given(JOBS, JOBS, st.integers(0, 60), st.integers(0, 20), st.integers(0, 60))
def test_the_plan_keeps_the_order_of_enst(
    resident: list[tuple[float, int]], hosted: list[tuple[float, int]], free: int, reserve: int, urgent: int
) -> None:
    facts = {f"r{i}": fact for i, fact in enumerate(resident)} | {
        f"h{i}": fact for i, fact in enumerate(hosted)
    }
    inside = [Job(f"r{i}", 0, 1) for i in range(len(resident))]
    outside = [Job(f"h{i}", 0, 1) for i in range(len(hosted))]

    def enst(job: Job) -> float:
        return facts[job.id][0]

    def blocks(job: Job) -> int:
        return facts[job.id][1]

    swaps = plan(inside, [], outside, enst=enst, blocks=blocks, free=free, reserve=reserve, urgent=urgent)
    left = [enst(job) for job in swaps.out]
    loaded = [enst(job) for job in swaps.into]
    assert left == sorted(left, reverse=True)
    assert loaded == sorted(loaded)
    assert all(enst(job) <= min(left) for job in inside if job not in swaps.out) if left else True
    assert not left or not loaded or max(loaded) <= min(left)
    freed = sum(map(blocks, swaps.out))
    assert sum(map(blocks, swaps.into)) <= max(0, free + freed - urgent - reserve)
    assert not swaps.out or free < urgent + reserve
    assert not swaps.out or free + freed - blocks(swaps.out[-1]) < urgent + reserve


def test_the_reserve_follows_recent_bursts_and_forgets_them() -> None:
    reserve = ArrivalReserve(window_s=1.0, quantile=1.0, history=4)
    assert reserve.blocks(0.0) == 0
    reserve.arrived(5, 0.1)
    reserve.arrived(7, 0.9)
    assert reserve.blocks(1.5) == 12
    assert reserve.blocks(9.0) == 0
