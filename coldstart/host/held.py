"""Requests that wait for their model, in order of arrival.

Invariant: a request waits once; `first` of each model is the oldest of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiting:
    request: str
    model: str
    since: float


class Held:
    """A queue over all models."""

    def __init__(self) -> None:
        self._all: dict[str, Waiting] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, request: str) -> bool:
        return request in self._all

    def add(self, request: str, model: str, now: float) -> None:
        self._all[request] = Waiting(request, model, now)

    def drop(self, request: str) -> bool:
        return self._all.pop(request, None) is not None

    def oldest(self) -> Waiting | None:
        return next(iter(self._all.values()), None)

    def models(self) -> list[Waiting]:
        """The oldest request of each model, in order."""
        first: dict[str, Waiting] = {}
        for waiting in self._all.values():
            first.setdefault(waiting.model, waiting)
        return list(first.values())

    def by_model(self) -> dict[str, int]:
        """How many wait for each model."""
        return Counter(waiting.model for waiting in self._all.values())

    def take(self, model: str) -> Iterator[Waiting]:
        """Remove and give the model's requests, oldest first."""
        for waiting in [one for one in self._all.values() if one.model == model]:
            yield self._all.pop(waiting.request)
