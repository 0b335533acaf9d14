"""Agenda of the fleet: its open requests, its timers, and the models that the core must look at again.

Invariant: `held` counts the waiting requests; each of them is in the queue of its model, and no other request is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from coldstart.fleet.deployments import Deployment

HOLD = "hold"


@dataclass(slots=True)
class TrackedRequest:
    """A request of `model` that arrived at `since`; `group` has it, None while it waits.

    `tries` counts groups that failed.
    """

    model: str
    since: float
    group: str | None = None
    tries: int = 0


class Agenda:
    """All open requests by name; a request that waits for more than `hold_s` seconds is due at a HOLD timer.

    Models are processed in the order in which they were touched. One that found no room is blocked: it is processed again
    once memory has become free on any server.
    """

    def __init__(self, models: Mapping[str, Deployment], hold_s: float) -> None:
        self.open: dict[str, TrackedRequest] = {}
        self.held = 0
        self._models, self._hold_s = models, hold_s
        self._timers: list[tuple[float, int, str, str]] = []
        self._number = 0
        self._touched: dict[str, None] = {}
        self._blocked: dict[str, None] = {}
        self._freed = False

    def wait(self, request: str, model: str, now: float) -> None:
        """Put a new request at the end of its model's queue."""
        self.open[request] = TrackedRequest(model, now)
        self._models[model].waiting[request] = now
        self._hold(request, model, now)

    def requeue(self, request: str, now: float) -> None:
        """Put a request whose group failed back in the queue, in its old position."""
        known = self.open[request]
        known.group = None
        self._models[known.model].back(request, known.since)
        self._hold(request, known.model, now)

    def _hold(self, request: str, model: str, now: float) -> None:
        self.held += 1
        self.plan(now + self._hold_s, HOLD, request)
        self.touch(model)

    def send(self, request: str, group: str) -> None:
        """Assign a waiting request to a group."""
        known = self.open[request]
        del self._models[known.model].waiting[request]
        self.held -= 1
        known.group = group

    def forget(self, request: str) -> TrackedRequest:
        """Remove an open request."""
        known = self.open.pop(request)
        if known.group is None:
            self.held -= 1
            self._models[known.model].waiting.pop(request, None)
        return known

    def waits(self, request: str) -> bool:
        known = self.open.get(request)
        return known is not None and known.group is None

    def plan(self, time: float, kind: str, name: str) -> None:
        """Add a timer."""
        self._number += 1
        heappush(self._timers, (time, self._number, kind, name))

    def deadline(self) -> float:
        """Return when the next timer is due; infinity: none."""
        return self._timers[0][0] if self._timers else inf

    def due(self, now: float) -> Iterator[tuple[str, str]]:
        """Yield the timers that are due, in order; timers added meanwhile are left for the next call."""
        last = self._number
        while self._timers and self._timers[0][0] <= now and self._timers[0][1] <= last:
            _, _, kind, name = heappop(self._timers)
            yield kind, name

    def touch(self, model: str) -> None:
        self._touched[model] = None

    def free(self) -> None:
        """Record that memory of a GPU or bandwidth of a link may have been released."""
        self._freed = True

    def block(self, model: str) -> None:
        self._blocked[model] = None

    def unblock(self, model: str) -> None:
        self._blocked.pop(model, None)

    def take(self) -> dict[str, None]:
        """Return the models to process now, and reset; empty if nothing has changed."""
        names = self._touched | (self._blocked if self._freed else {})
        self._touched, self._freed = {}, False
        return names
