"""Interface of a policy of the model cache, the cost of evicting a model, and the simplest policy, LRU.

Invariant: a policy reserves no memory and starts no process; the same object serves the live host and the simulator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Memory of a resident model in bytes (S, above 0), and the time to bring it back in seconds (P)."""

    memory: int
    penalty_s: float

    @property
    def density(self) -> float:
        """Return P/S: seconds lost per byte freed."""
        return self.penalty_s / self.memory


Costs = Mapping[str, ModelCost]
"""Costs by model. The owner may correct them with measurements, so policies read them again at each use."""


class Policy(Protocol):
    """Policy that chooses the models to evict. `now` is in seconds on one monotonic clock."""

    def requested(self, model: str, now: float, resident: bool) -> None:
        """Record a request; `resident` if the model already holds its memory (also while it starts).

        Called before a load that the request causes.
        """

    def loaded(self, model: str, now: float) -> None:
        """Record that the model starts and holds its memory."""

    def evicted(self, model: str, now: float) -> None:
        """Record that the model's memory is free, whatever the reason of its eviction."""

    def victims(self, free: Collection[str], need: int, now: float) -> Sequence[str]:
        """Return models out of `free` that together hold `need` bytes or more, or all if they hold less.

        `free` are models that may be evicted: loaded, not in use, not pinned. Changes no state: only `evicted` does.
        """


def take_first(order: Iterable[str], need: int, costs: Costs) -> list[str]:
    """Return the first models of an eviction order that together hold `need` bytes."""
    chosen: list[str] = []
    for model in order:
        if need <= 0:
            break
        chosen.append(model)
        need -= costs[model].memory
    return chosen


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
        return take_first((model for model in self._uses if model in members), need, self.costs)
