"""Each round contains every mode once, and every mode takes every position in turn."""

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
