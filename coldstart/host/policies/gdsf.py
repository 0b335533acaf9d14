"""GDSF with the miss penalty as cost (Cherkasova 1998; FaasCache uses it for warm functions).

Equation: H = L + F * P / S. F counts the uses since the load; L is the H of the last victim and ages the others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from coldstart.host.policies.protocol import Costs, first


class GDSF:
    """GDSF policy: evicts the model with the smallest H; of equals the least recently used."""

    def __init__(self, costs: Costs, capacity: int) -> None:
        self.costs, self._clock = costs, 0.0
        self._uses: dict[str, int] = {}
        self._value: dict[str, float] = {}

    def requested(self, model: str, now: float, resident: bool) -> None:
        if resident:
            self._touch(model)

    def loaded(self, model: str, now: float) -> None:
        self._touch(model)

    def _touch(self, model: str) -> None:
        self._uses[model] = self._uses.get(model, 0) + 1
        # Reinsert: the order of the dictionary decides among equals.
        self._value.pop(model, None)
        self._value[model] = self._clock + self._uses[model] * self.costs[model].density

    def evicted(self, model: str, now: float) -> None:
        self._clock = max(self._clock, self._value.pop(model, 0.0))
        self._uses.pop(model, None)

    def victims(self, free: Collection[str], need: int, now: float) -> Sequence[str]:
        members = set(free)
        order = sorted((m for m in self._value if m in members), key=self._value.__getitem__)
        return first(order, need, self.costs)

    def excess(self, model: str) -> float:
        """Return H - L: F * P / S of the model at its last use, minus the ageing since then."""
        return self._value[model] - self._clock
