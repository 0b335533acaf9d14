"""Which sizes of an iteration profile are measured, and how often, within a budget of seconds.

Small sizes come first: most iterations are small, the first queue's quantum comes of the shortest one, and beyond its last
point a curve goes on straight. A first round goes up through all sizes while half of the budget lasts; the other half repeats
what it has measured, a size where enough is left for the smaller ones' further rounds. Whatever disturbs an iteration makes it
longer, for a while: every round measures every size that fits, so that no size has all its measurements within one
disturbance, and the fastest counts.
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
    """Measurements of (curve, size): the fastest seconds of an iteration, and what one measurement costs on the clock."""

    measure: Measure
    budget_s: float
    now: Callable[[], float] = time.monotonic
    fastest: dict[Key, float] = field(default_factory=dict)
    cost: dict[Key, float] = field(default_factory=dict)
    left_out: list[Key] = field(default_factory=list)
    rounds: int = 0

    def run(self, sizes: Mapping[str, Sequence[int]], most: int = ROUNDS) -> dict[str, object]:
        """Measure every curve's `sizes` for at most `most` rounds; the `iterations` section.

        Beside the points it says how many rounds measured all of them, the seconds spent and granted, and the sizes that
        were left out. The smallest size of each curve is measured once whatever it costs.
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
        """One more round over what fits before `further` ones; whether that was all of it."""
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
        """At most proportional to what the next smaller one has cost; None where none has been measured."""
        known = max((below for of, below in self.cost if of == kind), default=None)
        return self.cost[kind, known] * size / known if known else None
