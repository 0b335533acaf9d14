"""Sizes and rounds of a profile within a budget, on a clock that only measurements advance."""

from __future__ import annotations

import pytest

from coldstart.scheduling.profile import IterationProfile
from coldstart.scheduling.profiling import Profiler

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
