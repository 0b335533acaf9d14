"""Measure an iteration profile within a time budget: the choice of sizes and repetitions.

Small sizes are measured first: most iterations are small, the shortest iteration is the quantum of the first
queue, and a curve is extrapolated after its last point. The first round measures sizes in ascending order
until half of the budget is used. Later rounds repeat a measured size if the remaining budget also covers the
later rounds of all smaller sizes.

Noise makes iterations longer for some time. Every round measures every size that fits, so that no size has
all its measurements in one noisy period, and the fastest measurement counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

ROUNDS = 5
BUDGET_S = 120.0
Key = tuple[str, int]
Measure = Callable[[str, int], float]


@dataclass
class Profiler:
    """Measurements by (curve, size): `fastest` has the iteration time, `cost` the time of one measurement, in seconds."""

    measure: Measure
    budget_s: float
    now: Callable[[], float] = time.monotonic
    fastest: dict[Key, float] = field(default_factory=dict)
    cost: dict[Key, float] = field(default_factory=dict)
    left_out: list[Key] = field(default_factory=list)
    rounds: int = 0

    def run(self, sizes: Mapping[str, Sequence[int]], most: int = ROUNDS) -> dict[str, object]:
        """Measure the `sizes` of each curve in at most `most` rounds; return the `iterations` section.

        The section has the points, the number of rounds that measured all sizes, the used and granted
        seconds, and the omitted sizes. The smallest size of each curve is always measured once.
        """
        began = self.now()
        order = sorted(
            ((kind, size) for kind, many in sizes.items() for size in many), key=lambda key: key[::-1]
        )
        self._first(order, began + self.budget_s / 2)
        self.rounds = 1
        for further in reversed(range(most - 1)):
            self.rounds += self._again(began + self.budget_s, further)
        points = {
            kind: [[size, self.fastest[kind, size]] for size in sorted(many) if (kind, size) in self.fastest]
            for kind, many in sizes.items()
        }
        left = {kind: sorted(size for of, size in self.left_out if of == kind) for kind in sizes}
        said = {"rounds": self.rounds, "seconds": round(self.now() - began, 3), "budget_s": self.budget_s}
        return {**points, **said, "left_out": {kind: many for kind, many in left.items() if many}}

    def _first(self, order: Sequence[Key], end: float) -> None:
        for key in order:
            expected = self._expected(*key)
            if expected is None or self.now() + expected <= end:
                self._measure(key)
            else:
                self.left_out.append(key)

    def _again(self, end: float, further: int) -> bool:
        """Run one more round, with a reserve for `further` later rounds; return whether it measured every size."""
        fitting, smaller_s = 0, 0.0
        for key in list(self.fastest):
            if self.now() + self.cost[key] + further * smaller_s <= end:
                self._measure(key)
                fitting += 1
            smaller_s += self.cost[key]
        return fitting == len(self.fastest)

    def _measure(self, key: Key) -> None:
        began = self.now()
        seconds = self.measure(*key)
        self.cost[key] = min(self.cost.get(key, float("inf")), self.now() - began)
        self.fastest[key] = min(self.fastest.get(key, float("inf")), seconds)

    def _expected(self, kind: str, size: int) -> float | None:
        """Return an upper bound of the cost: proportional to the next smaller size, or None if no size is measured."""
        known = max((below for of, below in self.cost if of == kind), default=None)
        return self.cost[kind, known] * size / known if known else None
