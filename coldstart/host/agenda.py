"""Open requests and timers of a decision core, without I/O. The cores of hosts and fleets use this module.

Invariant: a request is in the queue of at most one model, and at most once. A request that returns to the queue after it was
dispatched regains its original position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import takewhile
from math import inf
from typing import Protocol

from coldstart.host.events import RejectRequest


class ModelQueue(Protocol):
    """A model whose field `waiting` maps the requests that wait for it to the times of their arrival."""

    waiting: dict[str, float]


@dataclass(slots=True)
class TrackedRequest:
    """A request for `model` that arrived at time `arrived_at`.

    `group` is the group of a fleet, or the model of a host, to which the request was dispatched, or None while it waits.
    `failed_tries` is the number of groups that failed while they processed the request. `move_target` is the group to which
    its stream is being migrated. The request counts toward the load of this group from the start of the migration.
    """

    model: str
    arrived_at: float
    group: str | None = None
    failed_tries: int = 0
    move_target: str | None = None


class Agenda:
    """Open requests and timers of one decision core.

    `waiting` maps each request without a group to the time at which its wait began, in order of these times. A request may
    wait for `hold_s` seconds.
    """

    def __init__(self, models: Mapping[str, ModelQueue], hold_s: float) -> None:
        self.open: dict[str, TrackedRequest] = {}
        self.waiting: dict[str, float] = {}
        self.hold_s, self._models = hold_s, models
        self._timers: list[tuple[float, int, str, str]] = []
        self._number = 0

    def enqueue_request(self, request: str, model: str, now: float) -> None:
        """Append a new request to the queue of its model."""
        self.open[request] = TrackedRequest(model, now)
        self._models[model].waiting[request] = self.waiting[request] = now

    def requeue_request(self, request: str, now: float) -> None:
        """Return a request to its original position in the queue after its group failed."""
        known = self.open[request]
        known.group = None
        model = self._models[known.model]
        again = [*model.waiting.items(), (request, known.arrived_at)]
        model.waiting = dict(sorted(again, key=lambda one: one[1]))
        self.waiting[request] = now

    def assign_request(self, request: str, group: str) -> None:
        """Assign a waiting request to a group."""
        known = self.open[request]
        del self._models[known.model].waiting[request], self.waiting[request]
        known.group = group

    def remove_request(self, request: str) -> TrackedRequest:
        """Remove an open request, and return its record."""
        known = self.open.pop(request)
        if self.waiting.pop(request, None) is not None:
            self._models[known.model].waiting.pop(request, None)
        return known

    def list_oldest_per_model(self) -> list[TrackedRequest]:
        """Return the oldest waiting request of each model, in order of arrival."""
        first: dict[str, TrackedRequest] = {}
        for request in self.waiting:
            known = self.open[request]
            first.setdefault(known.model, known)
        return list(first.values())

    def reject_expired(self, now: float) -> Iterator[RejectRequest]:
        """Remove the requests that have waited for `hold_s` seconds, and yield a rejection for each of them."""
        for request in list(takewhile(lambda name: now >= self.waiting[name] + self.hold_s, self.waiting)):
            known = self.remove_request(request)
            reason = f"model {known.model} did not become ready within {now - known.arrived_at:.0f} s"
            yield RejectRequest(request, 504, reason)

    def add_timer(self, time: float, kind: str, name: str) -> None:
        """Add a timer of `kind` for the group or model `name`, due at `time`."""
        self._number += 1
        heappush(self._timers, (time, self._number, kind, name))

    def deadline(self) -> float:
        """Return the earliest time at which a timer is due or a request expires, or infinity if there is neither."""
        expires = next(iter(self.waiting.values()), inf) + self.hold_s
        return min(expires, self._timers[0][0]) if self._timers else expires

    def pop_due_timers(self, now: float) -> Iterator[tuple[str, str]]:
        """Remove and yield the kind and name of each timer that is due. Timers added during the iteration are not included."""
        last = self._number
        while self._timers and self._timers[0][0] <= now and self._timers[0][1] <= last:
            _, _, kind, name = heappop(self._timers)
            yield kind, name
