"""What a hazard says of a request that has got to bin a: prefix sums from which every index is read in O(bins).

Equations, with p_k = P(S in bin k), T_k = P(S is in bin k or later), x_k the middle of bin k, w(x) = 1/x:
    N_b = sum_{k<=b} p_k w(x_k),  U_b = sum_{k<=b} T_k (x_k - x_{k-1}),  H_b = sum_{k<=b} T_k (x_k - x_{k-1}) x_k
so that, for a request in bin a that runs to the end of bin b, divided by T_a: completions weighted by 1/length are
N_b - N_{a-1}, its steps U_b - U_{a-1}, its steps times its own tokens held H_b - H_{a-1}, and T_{b+1} is the chance that
it has not ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from coldstart.scheduling.express.lengths import MIDS


@dataclass(frozen=True)
class HazardTable:
    """Tuples by bin; those of sums begin with the empty sum, so [b + 1] - [a] is the sum from a to b."""

    tail: tuple[float, ...]
    value: tuple[float, ...]
    steps: tuple[float, ...]
    held: tuple[float, ...]

    @classmethod
    def of(cls, rates: Sequence[float]) -> HazardTable:
        """From h_k; who reaches the last bin ends there."""
        left, tail = 1.0, list[float]()
        value, steps, held = [0.0], [0.0], [0.0]
        for k, rate in enumerate(rates):
            tail.append(left)
            step = left * (MIDS[k] - (MIDS[k - 1] if k else 0.0))
            ends = left if k == len(rates) - 1 else left * rate
            value.append(value[-1] + ends / MIDS[k])
            steps.append(steps[-1] + step)
            held.append(held[-1] + step * MIDS[k])
            left -= ends
        return cls((*tail, 0.0), tuple(value), tuple(steps), tuple(held))

    @cached_property
    def bins(self) -> int:
        return len(self.tail) - 1

    @property
    def inverse(self) -> float:
        """E[1/S]."""
        return self.value[-1]

    @property
    def mean(self) -> float:
        """E[S] in tokens."""
        return self.steps[-1]
