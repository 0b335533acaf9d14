import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstart.scheduling.profile import Curve, IterationProfile, ProfileError

POINTS = st.lists(
    st.tuples(st.integers(1, 4096), st.floats(1e-4, 10)), min_size=1, max_size=8, unique_by=lambda p: p[0]
)


@given(POINTS, st.floats(0, 8192), st.floats(0, 8192))
def test_a_curve_never_falls(points: list[tuple[int, float]], a: float, b: float) -> None:
    curve = Curve.from_points(points, "prefill")
    low, high = sorted((a, b))
    assert curve(low) <= curve(high) * (1 + 1e-9)


def test_a_mixed_iteration_costs_more_than_either_part() -> None:
    profile = IterationProfile.create([(1, 0.02), (512, 0.05)], [(1, 0.02), (16, 0.025)])
    mixed = profile.iteration_s(512, 16)
    assert max(profile.iteration_s(512, 0), profile.iteration_s(0, 16)) < mixed < 0.075
    assert profile.iteration_s(0, 0) == 0.0


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "Expected `object`"),
        ({"prefill": [[1, 1]]}, "field `decode`"),
        ({"prefill": [], "decode": [[1, 1]]}, "no points"),
        ({"prefill": [[1, 0]], "decode": [[1, 1]]}, "is zero or negative"),
        ({"prefill": [[1, 1], [1, 2]], "decode": [[1, 1]]}, "two times for one size"),
        ({"prefill": [["a", 1]], "decode": [[1, 1]]}, "Expected `float`, got `str` - at `$.prefill[0][0]`"),
        ({"prefill": [[10**400, 1]], "decode": [[1, 1]]}, "Number out of range"),
    ],
)
def test_invalid_profile_is_refused_with_the_reason(document: object, words: str) -> None:
    with pytest.raises(ProfileError, match=re.escape(words)):
        IterationProfile.parse(document)
