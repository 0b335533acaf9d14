"""Room for the next step: who leaves the device when blocks or slots run short.

Invariant: parked requests leave first, the newest first; those of the main lane only by growth, as in the engine's own order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic

from coldstart.scheduling.express.policy import Express, Pass
from coldstart.scheduling.express.rhythm import Rhythm
from coldstart.scheduling.express.view import LaneView
from coldstart.scheduling.placement.view import R


class LaneRoom(Generic[R]):
    """`members` are in the lane; `parked` were, and `paused` of the main lane are left out for it: both keep their KV."""

    def __init__(self, view: LaneView[R], policy: Express, rhythm: Rhythm) -> None:
        self.view, self.policy, self.rhythm = view, policy, rhythm
        self.members: dict[str, Pass] = {}
        self.parked: dict[str, R] = {}
        self.paused: dict[str, R] = {}

    def hides(self, name: str) -> bool:
        """Whether it keeps its KV and is not shown."""
        return name in self.parked or name in self.paused

    def still(self, name: str) -> Iterator[R]:
        """The request, where it is hidden still."""
        if self.hides(name):
            yield self.parked[name] if name in self.parked else self.paused[name]

    def shown(self, name: str) -> bool:
        """It runs again, where it was hidden; whether it was."""
        if not self.hides(name):
            return False
        self.parked.pop(name, None)
        self.paused.pop(name, None)
        self.policy.inside(name)
        return True

    def grow(self, shown: list[R], lane: list[R]) -> bool:
        """Room for everybody's next token: parked ones leave, then, while some pause, the lane's newest and those."""
        view = self.view
        free = view.free_blocks()
        if not (self.parked or self.paused) or free >= len(shown) + len(lane):
            return False
        short = sum(map(view.needs, (*shown, *lane))) - free
        if short <= 0:
            return False
        victims = [*reversed(self.parked.values())]
        if self.paused:
            victims += [*reversed(lane), *reversed(self.paused.values())]
        evicted = False
        for victim in victims:
            if short <= 0:
                break
            held = view.held(victim)
            if self._evict(victim):
                short -= held
                evicted = True
                if victim in lane:
                    lane.remove(victim)
        return evicted

    def vacate(self, short: int, name: str, *, later: bool) -> int:
        """Let parked ones go, the newest first, where that is enough; with `later` only those that came after it."""
        view, own = self.view, self.policy.number(name)
        able = [request for other, request in self.parked.items() if other != name]
        if later:
            able = [r for r in able if self.number(r) > own]
        if sum(map(view.held, able)) < short:
            return 0
        freed = 0
        for request in sorted(able, key=self.number, reverse=True):
            if freed >= short:
                break
            held = view.held(request)
            freed += held if self._evict(request) else 0
        return freed

    def seat(self, shown: int, name: str) -> bool:
        """A slot of the model runner: who keeps its KV holds one, and the newest parked one leaves where none is left."""
        if self.hides(name):
            return True
        taken, slots = shown + len(self.parked) + len(self.paused), self.view.slots()
        if taken < slots:
            return True
        for request in [*reversed(self.parked.values())]:
            taken -= self._evict(request)
            if taken < slots:
                return True
        return False

    def _evict(self, request: R) -> bool:
        gone = self.view.evict(request)
        if not gone:
            self.rhythm.stir()  # a step in flight still writes its blocks
        return gone

    def number(self, request: R) -> int:
        """Its place in the order of arrival."""
        return self.policy.number(self.view.name(request))
