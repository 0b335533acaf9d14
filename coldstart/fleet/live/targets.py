"""Groups that a gateway sends requests to, by the controller's routes.

Invariant: a group whose route is withdrawn stays here until its last request has ended, and is then released once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from coldstart.fleet.live.messages import GroupRoute
from coldstart.fleet.live.replicas import FleetReplica


class Targets:
    """Groups of one gateway by name; `released` is called with each group that this gateway no longer uses."""

    def __init__(self, released: Callable[[str], None]) -> None:
        self.routed: dict[str, FleetReplica] = {}
        self._leaving: dict[str, FleetReplica] = {}
        self._released = released

    def names(self) -> list[str]:
        """Return the names of all groups that have, or may have, requests of this gateway."""
        return [*self.routed, *self._leaving]

    def update(self, routes: Iterable[GroupRoute]) -> None:
        """Replace the routes."""
        now = {route.group: route for route in routes}
        for name in [name for name in self.routed if name not in now]:
            self._withdraw(name)
        for name, route in now.items():
            if name not in self.routed:
                self.routed[name] = FleetReplica(route)
            self.routed[name].capacity = route.capacity

    def find(self, model: str, now: float, *, overload: bool) -> FleetReplica | None:
        """Return the first group with room, as the controller would choose.

        With `overload` a full group is better than none: the least busy one.
        """
        known = [t for t in self.routed.values() if t.name == model and t.suspect_until <= now]
        first = next((target for target in known if target.busy < target.capacity), None)
        if first is None and known and overload:
            return min(known, key=lambda target: target.busy)
        return first

    def free(self, target: FleetReplica) -> None:
        """Count one request less at the group."""
        target.busy -= 1
        self._release(target)

    def _withdraw(self, name: str) -> None:
        target = self._leaving[name] = self.routed.pop(name)
        target.withdrawn = True
        self._release(target)

    def _release(self, target: FleetReplica) -> None:
        if target.withdrawn and not target.busy and self._leaving.pop(target.group, None) is not None:
            self._released(target.group)
            target.upstream.close()

    def close(self) -> None:
        """Close all connections."""
        for target in (*self.routed.values(), *self._leaving.values()):
            target.upstream.close()
