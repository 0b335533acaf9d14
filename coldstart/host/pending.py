"""Pending requests: those whose model is not ready, in order of arrival.

Invariant: a request is in the queue at most once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request that waits for `model` since the time `since`, in seconds."""

    request: str
    model: str
    since: float


class PendingRequests:
    """Queue of the pending requests of all models."""

    def __init__(self) -> None:
        self._all: dict[str, PendingRequest] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, request: str) -> bool:
        return request in self._all

    def add(self, request: str, model: str, now: float) -> None:
        self._all[request] = PendingRequest(request, model, now)

    def drop(self, request: str) -> bool:
        return self._all.pop(request, None) is not None

    def oldest(self) -> PendingRequest | None:
        return next(iter(self._all.values()), None)

    def oldest_of_each_model(self) -> list[PendingRequest]:
        """Return the oldest request of each model, in order of arrival."""
        first: dict[str, PendingRequest] = {}
        for pending in self._all.values():
            first.setdefault(pending.model, pending)
        return list(first.values())

    def deadline(self, now: float, patience_s: float, hold_s: float) -> float:
        """Return when the oldest request has waited `hold_s`, or the oldest of a model `patience_s`; else infinity."""
        oldest = self.oldest()
        if oldest is None:
            return inf
        runs_out = (waiting.since + patience_s for waiting in self.oldest_of_each_model())
        return min([oldest.since + hold_s, *(time for time in runs_out if time > now)])

    def count_by_model(self) -> dict[str, int]:
        """Return the number of pending requests of each model."""
        return Counter(pending.model for pending in self._all.values())

    def take(self, model: str) -> Iterator[PendingRequest]:
        """Remove and yield the requests of `model`, oldest first."""
        for pending in [one for one in self._all.values() if one.model == model]:
            yield self._all.pop(pending.request)
