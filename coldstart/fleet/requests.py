"""Open requests of the fleet: those that wait for a group of their model, and those that a group has.

Invariant: `held` counts the waiting requests; each of them is in the queue of its model, and no other request is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coldstart.fleet.deployments import Deployment
from coldstart.fleet.recheck import Recheck
from coldstart.fleet.timers import Timers

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


class Requests:
    """All open requests by name; a request that waits for more than `hold_s` seconds is due at a HOLD timer."""

    def __init__(
        self, models: Mapping[str, Deployment], hold_s: float, timers: Timers, recheck: Recheck
    ) -> None:
        self.open: dict[str, TrackedRequest] = {}
        self.held = 0
        self._models, self._hold_s, self._timers, self._recheck = models, hold_s, timers, recheck

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
        self._timers.add(now + self._hold_s, HOLD, request)
        self._recheck.touch(model)

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
