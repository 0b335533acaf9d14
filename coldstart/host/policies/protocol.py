"""Interface of eviction policies, the cost of evicting a model, and the LRU policy.

Invariant: a policy neither reserves memory nor starts a process. The live host and the simulator use the same policies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Memory in bytes that an eviction of the model frees (S, above 0), and the seconds that it adds to the next start (P)."""

    memory: int
    penalty_s: float

    @property
    def density(self) -> float:
        """Return P/S, the seconds lost per byte freed."""
        return self.penalty_s / self.memory


Costs = Mapping[str, ModelCost]
"""Costs by model. Measurements can change them at any time, so policies must not cache them."""


class Policy(Protocol):
    """Interface of policies that choose which models to evict. `now` is in seconds on one monotonic clock."""

    def record_request(self, model: str, now: float, resident: bool) -> None:
        """Record a request before the load that it may cause. `resident` is True if the model already has its memory."""

    def record_load_start(self, model: str, now: float) -> None:
        """Record that the model is starting and its memory is reserved."""

    def record_eviction(self, model: str, now: float) -> None:
        """Record that the model's memory is being freed, for any reason."""

    def choose_victims(self, free: Collection[str], need: int, now: float) -> Sequence[str]:
        """Return models from `free` that together use at least `need` bytes, or all of them if they use less.

        `free` contains the models that can be evicted. The call does not change the state of the policy.
        """


def take_first(order: Iterable[str], need: int, costs: Costs) -> list[str]:
    """Return the first models in eviction order that together use at least `need` bytes, or all of them if they use less."""
    chosen: list[str] = []
    for model in order:
        if need <= 0:
            break
        chosen.append(model)
        need -= costs[model].memory
    return chosen


class LRU:
    """Eviction policy that evicts the least recently used models first."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        # An ordered set. The keys are models, with the most recently used one last.
        self._uses: dict[str, None] = {}

    def record_request(self, model: str, now: float, resident: bool) -> None:
        if resident:
            self._touch(model)

    def record_load_start(self, model: str, now: float) -> None:
        self._touch(model)

    def _touch(self, model: str) -> None:
        self._uses.pop(model, None)
        self._uses[model] = None

    def record_eviction(self, model: str, now: float) -> None:
        self._uses.pop(model, None)

    def choose_victims(self, free: Collection[str], need: int, now: float) -> Sequence[str]:
        members = set(free)
        return take_first((model for model in self._uses if model in members), need, self.costs)
