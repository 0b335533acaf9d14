"""LRU policy, which ignores the size and the penalty of a model."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from coldstart.host.policies.protocol import Costs, first


class LRU:
    """LRU policy: evicts the least recently used model."""

    def __init__(self, costs: Costs, capacity: int) -> None:
        self.costs = costs
        # In order of use, the latest last. The values are unused.
        self._uses: dict[str, None] = {}

    def requested(self, model: str, now: float, resident: bool) -> None:
        if resident:
            self._touch(model)

    def loaded(self, model: str, now: float) -> None:
        self._touch(model)

    def _touch(self, model: str) -> None:
        self._uses.pop(model, None)
        self._uses[model] = None

    def evicted(self, model: str, now: float) -> None:
        self._uses.pop(model, None)

    def victims(self, free: Collection[str], need: int, now: float) -> Sequence[str]:
        members = set(free)
        return first((model for model in self._uses if model in members), need, self.costs)
