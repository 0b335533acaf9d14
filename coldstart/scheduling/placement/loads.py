"""Which loads from the host to start in a step (FastServe, section 4.2).

Invariants: loads start in ascending ENST; a request is evicted for a load only if its ENST is larger, and only
for a load whose rank earns a slot now; loads never take what the picked need nor, unless their rank earns a
slot, the blocks kept for arrivals.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Generic

from coldstart.scheduling.job import Job
from coldstart.scheduling.placement.room import Room
from coldstart.scheduling.placement.view import Enst, R
from coldstart.scheduling.reserve import ArrivalReserve

AHEAD = 4
"""Batches of ranks that are looked at for loads ahead of use."""


class Loads(Generic[R]):
    """`blocked` names the requests whose rank earns a slot now, had their KV been here; `loading` those of them whose
    load is under way or starts now. The others wait for room, which every request with a smaller ENST has before them.
    """

    def __init__(
        self, room: Room[R], ranking: Iterable[Job], reserve: ArrivalReserve, *, ahead: bool
    ) -> None:
        self.room, self.view, self.ranking = room, room.view, ranking
        self.reserve, self.ahead = reserve, ahead
        self.blocked: list[str] = []
        self.loading: list[str] = []

    def choose(self, chosen: list[R], enst: Enst[R], now: float) -> list[R]:
        """Requests on the host whose load to start now; makes room for those whose rank earns a slot."""
        self.blocked, self.loading = [], []
        if not self.view.any_away():
            return []
        due, others = self._hosted()
        if not self.ahead:
            others = []
        if not due and not others:
            return []
        fitting = self._fitting(chosen, due, others, enst, self.reserve.blocks(now))
        self.loading += [self.view.name(request) for request in fitting if request in due]
        return fitting

    def _fitting(
        self, chosen: list[R], due: list[R], others: list[R], enst: Enst[R], reserve: int
    ) -> list[R]:
        """In ascending ENST; the first that does not fit ends it, so nobody overtakes it."""
        room, fresh = self.room, self.room.fresh
        earned, fitting = set(due), list[R]()
        # The engine starts a load only where the prefills under way keep what they still need.
        taken, pledged = self.view.reserved(), room.pledged
        for request in sorted([*due, *others], key=enst):
            need = room.needs(request)
            if request in earned:
                self._make_way(request, need + taken, [*chosen, *fitting], enst)
            spare = room.free - taken - (0 if request in earned else reserve)
            if need > spare or not fresh.admits(request, pledged):
                if request in earned:
                    break
                continue
            taken += need
            pledged += fresh.pledge(request)
            fitting.append(request)
        return fitting

    def _make_way(self, request: R, need: int, kept: list[R], enst: Enst[R]) -> None:
        """Let requests of larger ENST go, the largest first, if that is enough."""
        room = self.room
        if room.free >= need:
            return
        limit = enst(request)
        later = [victim for victim in reversed(room.victims(kept, enst)) if enst(victim) > limit]
        for victim in room.leavers(later, need - room.free, 0):
            room.evict(victim)

    def _hosted(self) -> tuple[list[R], list[R]]:
        """Requests on the host: those within the first B ranks, and the rest of a bounded look ahead."""
        view, batch = self.view, self.view.batch
        due: list[R] = []
        others: list[R] = []
        ranks = (job for job in self.ranking if not view.in_flight(job.id))
        for position, job in enumerate(islice(ranks, AHEAD * batch if self.ahead else batch)):
            earned = position < batch
            request = view.on_host(job.id)
            if request is not None:
                (due if earned else others).append(request)
            elif earned and view.loading(job.id):
                self.blocked.append(job.id)
        self.loading = list(self.blocked)
        self.blocked += [view.name(request) for request in due]
        return due, others
