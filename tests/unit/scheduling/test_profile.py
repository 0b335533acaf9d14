from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstart.scheduling.profile import Curve, IterationProfile, ProfileError
from coldstart.scheduling.profiling import Profiler

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


PREFILL = [1 << power for power in range(12)]
DECODE = [1 << power for power in range(7)]
SIZES = {"prefill": PREFILL, "decode": DECODE}


class Engine:
    """Fake engine: an iteration takes `floor_s` plus `token_s` per token, and a measurement costs `factor` times that."""

    def __init__(self, floor_s: float, token_s: float, factor: float = 1.0) -> None:
        self.floor_s, self.token_s, self.factor = floor_s, token_s, factor
        self.time, self.asked = 0.0, list[tuple[str, int]]()

    def measure(self, kind: str, size: int) -> float:
        self.asked.append((kind, size))
        seconds = self.floor_s + self.token_s * size
        self.time += seconds * self.factor
        return seconds

    def profile(self, budget_s: float) -> dict[str, object]:
        return Profiler(self.measure, budget_s, now=lambda: self.time).run(SIZES)


@pytest.mark.parametrize("token_s", [0.01, 0.03, 0.3, 3.0])
def test_profile_stays_within_its_budget_and_lists_missing_sizes(token_s: float) -> None:
    engine = Engine(0.5, token_s, factor=2.0)
    found = engine.profile(120)
    assert engine.time <= 120 and found["seconds"] == round(engine.time, 3) and found["budget_s"] == 120
    measured = {kind: [size for size, _ in found[kind]] for kind in SIZES}  # type: ignore[attr-defined]
    left = found["left_out"]
    assert isinstance(left, dict) and left["prefill"][-1] == 2048
    for kind, sizes in SIZES.items():
        assert measured[kind] + left.get(kind, []) == sizes
    # What is left is still a profile, for bundles and schedulers.
    assert IterationProfile.parse(found).shortest_s == pytest.approx(0.5 + token_s)
