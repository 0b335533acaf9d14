"""Each round contains every mode once, and every mode takes every position in turn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstart.bench import run_order


@given(st.lists(st.sampled_from(run_order.MODES), min_size=1, unique=True), st.integers(1, 20))
def test_every_round_holds_every_mode_once(modes: list[str], runs: int) -> None:
    rounds = run_order.rounds(modes, runs)
    assert len(rounds) == runs
    assert all(sorted(order) == sorted(modes) for order in rounds)


def test_the_order_rotates() -> None:
    firsts = [order[0] for order in run_order.rounds(run_order.MODES, len(run_order.MODES))]
    assert firsts == list(run_order.MODES)


@pytest.mark.parametrize(
    ("modes", "runs"), [(["nonsense"], 1), (["fresh", "fresh"], 1), ([], 1), (["fresh"], 0)]
)
def test_an_impossible_plan_is_refused(modes: list[str], runs: int) -> None:
    with pytest.raises(ValueError, match=r"mode|run"):
        run_order.rounds(modes, runs)


def test_warm_caches_are_warmed_and_empty_ones_are_not() -> None:
    assert run_order.warmups(run_order.VLLM_WARM, 0) == 1
    assert [run_order.warmups(run_order.VLLM_WARM, n, cold_first=True) for n in (0, 1, 2)] == [0, 0, 1]
    assert run_order.warmups(run_order.VLLM_COLD, 3) == 0
    assert run_order.warmups(run_order.FRESH, 2) == 2
