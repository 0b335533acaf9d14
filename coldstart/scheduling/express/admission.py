"""Who starts in a step: the main lane in order of arrival while it fits, then whom the index puts ahead.

Invariants: the main lane starts in order of arrival and leaves room for what the lane asks for; with slots short its
youngest pauses and keeps its KV; somebody is shown whenever anybody holds KV.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic

from coldstart.scheduling.express.gauge import FEWEST, Gauge
from coldstart.scheduling.express.index import Standing
from coldstart.scheduling.express.policy import Express, Pass
from coldstart.scheduling.express.room import LaneRoom
from coldstart.scheduling.express.view import LaneView
from coldstart.scheduling.job import Job
from coldstart.scheduling.placement.view import R

LOOKED_AT = 8
"""Candidates of a step: more would pass only where many bursts fit at once."""

Candidacy = list[tuple[Job, Standing]]
"""Who could pass, the best first."""


@dataclass(slots=True)
class Turn(Generic[R]):
    """`running` in the order in which the engine is to serve and, from the end, to evict; `joining` to be admitted after, in
    that order; everybody else keeps what it holds and is not shown.
    """

    running: list[R] = field(default_factory=list)
    joining: list[R] = field(default_factory=list)


class LaneAdmission(Generic[R]):
    """`entering` are the passes of this step that the engine has yet to admit, with the reason where somebody watches."""

    def __init__(self, view: LaneView[R], policy: Express, room: LaneRoom[R], gauge: Gauge[R]) -> None:
        self.view, self.policy, self.room, self.gauge = view, policy, room, gauge
        self.members, self.parked, self.paused = room.members, room.parked, room.paused
        self.entering: dict[str, dict[str, object]] = {}

    def admit(self, turn: Turn[R], lane: list[R], asking: Candidacy) -> list[R]:
        """Fill the turn; who of the parked goes on in the lane is returned."""
        view = self.view
        needs = [view.needs(view.request(job.id)) for job, _ in asking]
        free = self._main(turn, lane, self.gauge.kept(self.members, needs))
        return self._pass(turn, free, lane, asking, needs)

    def anybody(self, turn: Turn[R]) -> None:
        """Nobody runs: who holds KV does, beside those who join, who may have to load first or may not fit after all.

        Without either, the first in line joins: the engine itself says whether it fits.
        """
        hidden = [*self.paused.items(), *self.parked.items()]
        if hidden and len(turn.joining) >= self.view.batch:
            turn.joining.pop()
        for name, request in hidden[: self.view.batch - len(turn.joining)]:
            self.room.shown(name)
            turn.running.append(request)
        if not turn.running and not turn.joining:
            turn.joining += islice(filter(self.view.able, self._by_arrival()), 1)

    def _main(self, turn: Turn[R], lane: list[R], kept: int) -> int:
        """Resume, admit and load until the first that does not fit besides the blocks kept for the lane; those left."""
        view, room = self.view, self.room
        free = view.free_blocks()
        growing = len(turn.running) + len(lane)
        if free < 2 * growing + kept + view.capacity // 8:
            free -= sum(map(view.needs, (*turn.running, *lane)))
        if growing >= view.batch:
            return free
        for request in self._by_arrival():
            name, need = view.name(request), view.needs(request)
            if not room.hides(name) and not view.able(request):
                room.rhythm.stir()  # nobody tells when it is
                continue
            if need + kept > free:
                free += room.vacate(need + kept - free, name, later=True)
            if need > free or (need + kept > free and (turn.running or turn.joining)):
                break
            taken = len(turn.running) + len(turn.joining) + len(lane)
            if taken >= view.batch or not room.seat(taken, name):
                break
            free -= need
            (turn.running if room.shown(name) else turn.joining).append(request)
        return free

    def _by_arrival(self) -> Iterator[R]:
        """Everybody who holds no slot, in order of arrival; whose KV is back on the device first, as in the engine: what
        it holds could be what another waits for.
        """
        view, number, last = self.view, self.policy.number, 0
        yield from (r for r in view.landed() if view.name(r) not in self.members)
        hidden = sorted((*self.parked, *self.paused), key=number, reverse=True)
        if not hidden:
            yield from view.outside()
            return
        for request in view.outside():
            own = number(view.name(request))
            while hidden and number(hidden[-1]) < own:
                yield from self.room.still(hidden.pop())
            if own > last:  # who has been evicted meanwhile may have moved it back by a place
                last = own
                yield request
        for name in reversed(hidden):
            yield from self.room.still(name)

    def _pass(self, turn: Turn[R], free: int, lane: list[R], asking: Candidacy, needs: list[int]) -> list[R]:
        """Start whom the index puts ahead, after those whose load for it has landed."""
        view, room, taken = self.view, self.room, len(lane)
        for request in view.landed():
            if view.name(request) in self.members and self._slot(turn, len(lane), view.name(request)):
                turn.joining.append(request)
                taken += 1
        back: list[R] = []
        most = max(1, min(view.batch, max(FEWEST, len(turn.running) + taken)))
        joining = set(turn.joining)
        for (job, standing), need in zip(asking, needs, strict=True):
            if taken >= most:
                break
            request = view.request(job.id)
            if request in joining or job.id not in self.policy.waiting:
                continue
            if not room.hides(job.id) and not view.able(request):
                room.rhythm.stir()
                continue
            if need > free:
                free += room.vacate(need - free, job.id, later=False)
            if need > free or not self._slot(turn, len(lane) + len(back), job.id):
                continue
            free, taken = free - need, taken + 1
            self._enter(job, standing)
            (back if room.shown(job.id) else turn.joining).append(request)
        return back

    def _slot(self, turn: Turn[R], lane: int, name: str) -> bool:
        """A slot of the batch for one more in the lane: the youngest of the main lane pauses where there is none."""
        taken = len(turn.running) + len(turn.joining) + lane
        full = taken >= self.view.batch
        if (full and len(turn.running) < 2) or not self.room.seat(taken, name):
            return False
        if full:
            youngest = turn.running.pop()
            self.paused[self.view.name(youngest)] = youngest
        return True

    def _enter(self, job: Job, standing: Standing) -> None:
        worth = self.policy.index.worth(standing)
        self.members[job.id] = passed = Pass(standing.kind, worth.until, worth.chance)
        # Put into words only for those who watch.
        self.entering[job.id] = self.policy.reason(passed, standing) if self.policy.observer else {}
