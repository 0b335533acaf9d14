"""Which loads from the host to start in a step.

Invariants: loads start in ascending ENST; a request is evicted for a load only if its ENST is larger, and only
for a load whose rank earns a slot now; loads never take what the picked need nor, unless their rank earns a
slot, the blocks kept for arrivals.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from vllm.v1.request import Request

from coldstart.vllm.scheduling.room import Enst
from coldstart.vllm.scheduling.states import State

if TYPE_CHECKING:
    from coldstart.vllm.scheduling.scheduler import PolicyScheduler

AHEAD = 4
"""Batches of ranks that are looked at for loads ahead of use."""


class Loads:
    """`blocked` names the requests whose rank earns a slot now, had their KV been here; `loading` those of them whose
    load is under way or starts now. The others wait for room, which every request with a smaller ENST has before them.
    """

    def __init__(self, scheduler: PolicyScheduler) -> None:
        self.scheduler = scheduler
        self.blocked: list[str] = []
        self.loading: list[str] = []

    def choose(self, chosen: list[Request], enst: Enst, now: float) -> list[Request]:
        """Requests on the host whose load to start now; makes room for those whose rank earns a slot."""
        scheduler = self.scheduler
        self.blocked, self.loading = [], []
        if not scheduler.host.away and not scheduler.picked_holding:
            return []
        due, others = self._hosted()
        if scheduler.settings.strategy != "proactive":
            others = []
        if not due and not others:
            return []
        fitting = self._fitting(chosen, due, others, enst, now)
        self.loading += [request.request_id for request in fitting if request in due]
        return fitting

    def _fitting(
        self, chosen: list[Request], due: list[Request], others: list[Request], enst: Enst, now: float
    ) -> list[Request]:
        """In ascending ENST; the first that does not fit ends it, so nobody overtakes it."""
        scheduler, room = self.scheduler, self.scheduler.room
        earned, fitting = set(due), list[Request]()
        # vLLM starts a load only where the prefills under way keep what they still need.
        taken = scheduler._inflight_prefill_reserved_blocks()
        reserve, pledged = scheduler.reserve.blocks(now), room.pledged
        for request in sorted([*due, *others], key=enst):
            need = room.needs(request)
            if request in earned:
                self._make_way(request, need + taken, [*chosen, *fitting], enst)
            spare = room.free - taken - (0 if request in earned else reserve)
            if need > spare or not scheduler.fresh.admits(request, pledged):
                if request in earned:
                    break
                continue
            taken += need
            pledged += scheduler.fresh.pledge(request)
            fitting.append(request)
        return fitting

    def _make_way(self, request: Request, need: int, kept: list[Request], enst: Enst) -> None:
        """Let requests of larger ENST go, the largest first, if that is enough."""
        room = self.scheduler.room
        if room.free >= need:
            return
        limit = enst(request)
        later = [victim for victim in reversed(room.victims(kept, enst)) if enst(victim) > limit]
        for victim in room.leavers(later, need - room.free, 0):
            room.evict(victim)

    def _hosted(self) -> tuple[list[Request], list[Request]]:
        """Requests on the host: those within the first B ranks, and the rest of a bounded look ahead."""
        scheduler, away = self.scheduler, self.scheduler.host.away
        due: list[Request] = []
        others: list[Request] = []
        for position, job in enumerate(islice(scheduler.ranking, AHEAD * scheduler.batch)):
            earned = position < scheduler.batch
            request = away.get(job.id)
            if request is None:
                if earned and self._loading(job.id):
                    self.blocked.append(job.id)
            elif scheduler.state(request) is State.HOST and scheduler.host.hit(request):
                (due if earned else others).append(request)
        self.loading = list(self.blocked)
        self.blocked += [request.request_id for request in due]
        return due, others

    def _loading(self, request_id: str) -> bool:
        request = self.scheduler.picked_holding.get(request_id)
        return request is not None and self.scheduler.state(request) is State.LOADING
