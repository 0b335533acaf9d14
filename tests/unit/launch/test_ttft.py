"""Equation 5: overlapping terms and limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstart.launch.ttft import StartCosts, Worker, ttft

COSTS = StartCosts(waiting=1, creation=2, context=3, libraries=10, prefill=4, transfer=0.5)
FAST = Worker(device=100.0, network=100.0)


def test_a_fast_network_and_device_leave_the_runtime_alone() -> None:
    assert ttft(COSTS, 100, [FAST]) == 1 + (2 + 3 + 10) + 4 + 0.5


def test_the_slower_of_fetching_and_the_runtime_counts() -> None:
    assert ttft(COSTS, 100, [Worker(100, 2)]) == 1 + 50 + 4 + 0.5
    assert ttft(COSTS, 100, [Worker(5, 100)]) == 1 + (2 + 3 + 20) + 4 + 0.5
    assert ttft(COSTS, 100, [Worker(100, None)], loads_while_importing=False) == 1 + (2 + 3 + 11) + 4 + 0.5


def test_low_memory_workers_take_turns_and_the_slowest_counts() -> None:
    both = [FAST, Worker(100, 2)]
    assert ttft(COSTS, 100, both, full=0) == 1 + 25 + 4 * 2 + 1
    assert ttft(COSTS, 100, both, full=2) == 1 + 25 + 4 * 1 + 1


@given(st.floats(1, 1e12), st.integers(1, 8), st.floats(1, 1e9))
def test_more_workers_never_fetch_longer(size: float, count: int, rate: float) -> None:
    fetching = StartCosts()
    one, more = (ttft(fetching, size, [Worker(rate, rate)] * n, full=n) for n in (count, count + 1))
    assert more <= one


@pytest.mark.parametrize(
    ("workers", "full"), [([], 0), ([FAST], 2), ([Worker(0)], 1), ([Worker(1, 0)], 1), ([FAST], -1)]
)
def test_invalid_workers_are_refused(workers: list[Worker], full: int) -> None:
    with pytest.raises(ValueError, match=r"full|positive"):
        ttft(COSTS, 1, workers, full)
