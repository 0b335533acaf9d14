"""What a policy of the model cache offers, and what a model's absence costs.

Invariant: a policy holds no memory and starts nothing; the same object serves the live host and the simulator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Bytes that a resident model holds (S, above 0), and seconds that bringing it back takes (P)."""

    memory: int
    penalty_s: float

    @property
    def density(self) -> float:
        """P/S: seconds lost per byte won."""
        return self.penalty_s / self.memory


Costs = Mapping[str, ModelCost]
"""By model. The owner may correct it by what it observes; policies read it anew at each use."""


class Policy(Protocol):
    """Chooses what leaves. `now` is in seconds on one clock and never goes back."""

    def requested(self, model: str, now: float, resident: bool) -> None:
        """A request arrived; `resident` where the model holds its memory already (also while it starts).

        Called before any load that follows from it.
        """

    def loaded(self, model: str, now: float) -> None:
        """The model's memory was taken: it starts."""

    def evicted(self, model: str, now: float) -> None:
        """The model's memory is free again, whoever chose that."""

    def victims(self, free: Collection[str], need: int, now: float) -> Sequence[str]:
        """Models out of `free` that hold `need` bytes or more together; all of them where even that is less.

        `free` are models that may leave: loaded, not in use, not pinned. Changes nothing: only `evicted` does.
        """


def first(order: Iterable[str], need: int, costs: Costs) -> list[str]:
    """The head of an order of eviction that holds `need` bytes."""
    chosen: list[str] = []
    for model in order:
        if need <= 0:
            break
        chosen.append(model)
        need -= costs[model].memory
    return chosen
