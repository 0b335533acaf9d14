"""Choice of the loads from host memory that start in a step (FastServe, section 4.2).

Invariants: loads start in ascending ENST. A load may evict a request only if that request has a larger ENST
and the loaded request ranks within the batch. A load never takes blocks that the picked requests need. It
takes blocks reserved for arrivals only if its request ranks within the batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from vllm.v1.request import Request

from coldstart.scheduling.job import Job
from coldstart.scheduling.reserve import ArrivalReserve
from coldstart.vllm.scheduling.room import Room
from coldstart.vllm.scheduling.view import Enst

AHEAD = 4
"""Number of batches of ranks that are considered for loads ahead of use."""


class Loads:
    """Choice of loads; `blocked` has the requests whose rank is within the batch but whose KV is not on the device.

    `loading` has those of them whose load is under way or starts now. The others wait for free blocks, and
    requests with a smaller ENST get blocks first.
    """

    def __init__(self, room: Room, ranking: Iterable[Job], reserve: ArrivalReserve, *, ahead: bool) -> None:
        self.room, self.view, self.ranking = room, room.view, ranking
        self.reserve, self.ahead = reserve, ahead
        self.blocked: list[str] = []
        self.loading: list[str] = []

    def choose(self, chosen: list[Request], enst: Enst, now: float) -> list[Request]:
        """Return the requests whose load starts now; evict others for requests that rank within the batch."""
        self.blocked, self.loading = [], []
        if not self.view.has_evicted():
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
        self, chosen: list[Request], due: list[Request], others: list[Request], enst: Enst, reserve: int
    ) -> list[Request]:
        """Return the requests that fit, in ascending ENST; stop at the first within the batch that does not fit."""
        room, fresh = self.room, self.room.fresh
        earned, fitting = set(due), list[Request]()
        # The engine starts a load only if the prefills under way still get the blocks that they need.
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

    def _make_way(self, request: Request, need: int, kept: list[Request], enst: Enst) -> None:
        """Evict requests with a larger ENST, the largest first, if this frees enough blocks."""
        room = self.room
        if room.free >= need:
            return
        limit = enst(request)
        later = [victim for victim in reversed(room.list_victims(kept, enst)) if enst(victim) > limit]
        for victim in room.choose_victims(later, need - room.free, 0):
            room.evict(victim)

    def _hosted(self) -> tuple[list[Request], list[Request]]:
        """Return the requests on the host: those within the first B ranks, and those of a limited look-ahead."""
        view, batch = self.view, self.view.batch
        due: list[Request] = []
        others: list[Request] = []
        ranks = (job for job in self.ranking if not view.is_in_flight(job.id))
        for position, job in enumerate(islice(ranks, AHEAD * batch if self.ahead else batch)):
            earned = position < batch
            request = view.find_on_host(job.id)
            if request is not None:
                (due if earned else others).append(request)
            elif earned and view.loading(job.id):
                self.blocked.append(job.id)
        self.loading = list(self.blocked)
        self.blocked += [view.name(request) for request in due]
        return due, others
