"""LRU, LFU and SRRIP policies, which ignore the size and the penalty of a model.

LFU counts only while a model is resident, as Amazon's multi-model endpoints do. SRRIP: Jaleel et al., ISCA 2010, hit
priority.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from coldstart.host.policies.protocol import Costs, first


class LRU:
    """LRU policy: evicts the least recently used model."""

    def __init__(self, costs: Costs, capacity: int) -> None:
        self.costs = costs
        # In order of use, the latest last.
        self._uses: dict[str, int] = {}

    def requested(self, model: str, now: float, resident: bool) -> None:
        if resident:
            self._touch(model)

    def loaded(self, model: str, now: float) -> None:
        self._touch(model)

    def _touch(self, model: str) -> None:
        self._uses[model] = self._uses.pop(model, 0) + 1

    def evicted(self, model: str, now: float) -> None:
        self._uses.pop(model, None)

    def victims(self, free: Collection[str], need: int, now: float) -> Sequence[str]:
        members = set(free)
        return first((model for model in self._uses if model in members), need, self.costs)


class LFU(LRU):
    """LFU policy: evicts the model with the fewest uses since its load; of equals the least recently used."""

    def victims(self, free: Collection[str], need: int, now: float) -> Sequence[str]:
        members = set(free)
        order = sorted((m for m in self._uses if m in members), key=self._uses.__getitem__)
        return first(order, need, self.costs)


class SRRIP:
    """SRRIP policy: evicts the model with the most distant predicted use.

    Predictions have `bits` bits: 0 on a hit, the maximum minus one on a load.
    """

    def __init__(self, costs: Costs, capacity: int, bits: int = 2) -> None:
        self.costs, self._last = costs, 2**bits - 1
        self._prediction: dict[str, int] = {}

    def requested(self, model: str, now: float, resident: bool) -> None:
        if resident:
            self._prediction[model] = 0

    def loaded(self, model: str, now: float) -> None:
        self._prediction[model] = self._last - 1

    def evicted(self, model: str, now: float) -> None:
        """Age all other models as far as the victim had to age to be evicted."""
        aged = self._last - self._prediction.pop(model, self._last)
        if aged:
            for other, value in self._prediction.items():
                self._prediction[other] = min(self._last, value + aged)

    def victims(self, free: Collection[str], need: int, now: float) -> Sequence[str]:
        members = set(free)
        order = sorted((m for m in self._prediction if m in members), key=lambda m: -self._prediction[m])
        return first(order, need, self.costs)
