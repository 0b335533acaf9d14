"""One deployed model in the core: its waiting requests, in order of arrival, and its groups.

The number of workers that a model needs now is that of ParaServe, section 6.1:
required = ceil(max(0, waiting + arrivals in W - room) / batch).
`room` is the number of requests that live and starting workers can still accept. The paper subtracts complete live
workers; if all of them were busy, it would never start another one.

Invariant: a request waits for at most one model, once; a request that was sent and came back waits in its old
position.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil

from coldstart.fleet.groups import Group, GroupPhase
from coldstart.fleet.specification import FleetModel, FleetSettings


@dataclass(slots=True)
class Deployment:
    """State of one deployed model.

    `failures` counts failures in a row. No group starts before `retry_at`, and none on a server of `failed_on` unless
    no other server is suitable.
    """

    spec: FleetModel
    window_s: float
    arrivals: deque[float] = field(default_factory=deque)
    waiting: dict[str, float] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    failures: int = 0
    retry_at: float = 0.0
    failed_on: dict[str, float] = field(default_factory=dict)
    error: str = ""
    retired: bool = False
    number: int = 0

    def count_arrival(self, now: float) -> None:
        """Add an arrival to those of the last `window_s` seconds, the estimate for the next period."""
        self.arrivals.append(now)

    def live(self) -> int:
        """Return the number of workers that serve or will serve after consolidation."""
        return sum(group.keep for group in self.groups.values() if group.phase is not GroupPhase.LEAVING)

    def spares(self, group: Group) -> bool:
        """Return whether the model has its minimum number of workers without the group."""
        return self.live() - group.keep >= self.spec.least

    def wanted(self, now: float) -> int:
        """Return the number of workers to start now."""
        if self.retired or now < self.retry_at:
            return 0
        room = sum(group.spare for group in self.groups.values())
        while self.arrivals and self.arrivals[0] <= now - self.window_s:
            self.arrivals.popleft()
        waiting = len(self.waiting)
        need = ceil((waiting + len(self.arrivals) - room) / self.spec.batch) if waiting > room else 0
        live = self.live()
        return max(0, min(max(need, self.spec.least - live), self.spec.most - live))

    def oldest(self) -> float | None:
        return next(iter(self.waiting.values()), None)

    def next_to_send(self, now: float) -> tuple[str, Group] | None:
        """Return the request that waits longest and the first group with room for it, or None."""
        request = next(iter(self.waiting), None)
        if request is None:
            return None
        for group in self.groups.values():
            if group.phase is GroupPhase.SERVING and group.spare and group.suspect_until <= now:
                return request, group
        return None

    def back(self, request: str, since: float) -> None:
        """Queue a request again that was already sent, in its old position."""
        again = [*self.waiting.items(), (request, since)]
        self.waiting = dict(sorted(again, key=lambda one: one[1]))

    def avoided(self, now: float) -> frozenset[str]:
        """Return the servers where a start failed recently: the cause may be the server (a full disk), not the model."""
        self.failed_on = {server: until for server, until in self.failed_on.items() if now < until}
        return frozenset(self.failed_on)

    def failed(self, reason: str, now: float, settings: FleetSettings, *, counts: bool) -> None:
        self.failures, self.error = self.failures + counts, reason
        backoff = settings.backoff_s * 2 ** min(max(self.failures - 1, 0), 60)
        self.retry_at = now + min(settings.backoff_max_s, backoff)
