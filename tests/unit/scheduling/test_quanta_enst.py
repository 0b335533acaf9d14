import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstart.scheduling.enst import execute_times
from coldstart.scheduling.quanta import geometric, join_level


@given(st.floats(1e-3, 10), st.integers(1, 12), st.floats(1e-4, 100))
def test_the_join_level_is_the_highest_that_covers_the_time(
    first: float, levels: int, seconds: float
) -> None:
    quanta = geometric(first, levels)
    level = join_level(quanta, seconds)
    assert quanta[level] >= seconds * (1 - 1e-8) or level == levels - 1
    assert level == 0 or quanta[level - 1] < seconds


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 64))
def test_execute_time_is_the_papers_double_sum(counts: list[int], batch: int) -> None:
    quanta = geometric(0.5, len(counts))
    for level, found in enumerate(execute_times(counts, quanta, batch)):
        wanted = sum(counts[j] * sum(quanta[j:level]) for j in range(level)) / batch
        assert found == pytest.approx(wanted)


@pytest.mark.parametrize(("first", "levels", "growth"), [(0, 3, 2), (1, 0, 2), (1, 3, 1)])
def test_impossible_quanta_are_refused(first: float, levels: int, growth: float) -> None:
    with pytest.raises(ValueError, match="quanta"):
        geometric(first, levels, growth)
