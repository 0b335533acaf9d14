"""Intervals contain their ratio, pairing cancels effects of a round, and equal input gives equal output."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstart.bench.stats import paired_ratio, ratio_interval, summarize

seconds = st.floats(0.1, 100)


def test_summarize_returns_median_and_range() -> None:
    assert summarize([3, 1, 2]) == {"median": 2, "min": 1, "max": 3, "n": 3}
    with pytest.raises(ValueError, match="no samples"):
        summarize([])


def test_a_paired_ratio_cancels_what_rounds_share() -> None:
    slow = {0: 10.0, 1: 40.0, 2: 20.0, 3: 30.0, 4: 100.0}
    result = paired_ratio(slow, {key: value / 5 for key, value in slow.items()})
    assert result is not None
    ratio, (low, high) = result
    assert ratio == low == high == 5


@given(st.lists(seconds, min_size=3, max_size=9), st.lists(seconds, min_size=3, max_size=9))
def test_the_interval_is_repeatable_and_within_the_extremes(one: list[float], two: list[float]) -> None:
    low, high = ratio_interval(one, two)
    assert min(one) / max(two) <= low <= high <= max(one) / min(two)
    assert (low, high) == ratio_interval(one, two)
