"""Measure an iteration profile within a time budget, and choose the sizes and repetitions.

Small sizes are measured first: most iterations are small, the shortest iteration is the quantum of the first
queue, and a curve is extrapolated beyond its last point. The first round measures sizes in ascending order
until half of the budget is used. Later rounds measure a size again if the remaining budget also
covers the later rounds of all smaller sizes.

Noise lengthens iterations during some periods. Every round measures every size that fits, so that no size is measured
only during a noisy period, and the fastest measurement counts.
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
class IterationProfiler:
    """Profiler of iteration times.

    `fastest` are the times by (curve, size), and `cost` the seconds that a measurement takes.
    """

    measure: Measure
    budget_s: float
    now: Callable[[], float] = time.monotonic
    fastest: dict[Key, float] = field(default_factory=dict)
    cost: dict[Key, float] = field(default_factory=dict)
    omitted_sizes: list[Key] = field(default_factory=list)
    rounds: int = 0

    def run(self, sizes: Mapping[str, Sequence[int]], max_rounds: int = ROUNDS) -> dict[str, object]:
        """Measure the `sizes` of each curve in at most `max_rounds` rounds, and return the `iterations` section.

        The section contains the measured points, the number of rounds that measured all sizes, the seconds used, the
        budget, and the omitted sizes. The smallest size of each curve is always measured at least once.
        """
        started_s = self.now()
        order = sorted(
            ((kind, size) for kind, many in sizes.items() for size in many), key=lambda key: key[::-1]
        )
        self._run_first_round(order, started_s + self.budget_s / 2)
        self.rounds = 1
        for later_rounds in reversed(range(max_rounds - 1)):
            self.rounds += self._repeat_round(started_s + self.budget_s, later_rounds)
        points = {
            kind: [[size, self.fastest[kind, size]] for size in sorted(many) if (kind, size) in self.fastest]
            for kind, many in sizes.items()
        }
        omitted = {kind: sorted(size for of, size in self.omitted_sizes if of == kind) for kind in sizes}
        totals = {
            "rounds": self.rounds,
            "seconds": round(self.now() - started_s, 3),
            "budget_s": self.budget_s,
        }
        return {**points, **totals, "left_out": {kind: many for kind, many in omitted.items() if many}}

    def _run_first_round(self, order: Sequence[Key], end: float) -> None:
        for key in order:
            expected = self._estimate_cost_s(*key)
            if expected is None or self.now() + expected <= end:
                self._measure(key)
            else:
                self.omitted_sizes.append(key)

    def _repeat_round(self, end: float, later_rounds: int) -> bool:
        """Run another round, reserving time for `later_rounds` more, and return whether it measured every size."""
        fitting, smaller_s = 0, 0.0
        for key in list(self.fastest):
            if self.now() + self.cost[key] + later_rounds * smaller_s <= end:
                self._measure(key)
                fitting += 1
            smaller_s += self.cost[key]
        return fitting == len(self.fastest)

    def _measure(self, key: Key) -> None:
        started_s = self.now()
        seconds = self.measure(*key)
        self.cost[key] = min(self.cost.get(key, float("inf")), self.now() - started_s)
        self.fastest[key] = min(self.fastest.get(key, float("inf")), seconds)

    def _estimate_cost_s(self, kind: str, size: int) -> float | None:
        """Return an upper bound of a measurement's cost in seconds, scaled from the next smaller size, or None if unknown."""
        measured_size = max((below for of, below in self.cost if of == kind), default=None)
        return self.cost[kind, measured_size] * size / measured_size if measured_size else None
