"""Memory and slots for the picked requests on the real engine.

Invariants: blocks go to picked requests in rank order; victims leave in descending ENST, from outside the
batch first, then from its tail; between two evictions a request gains a token; nobody is evicted for a
request that would not fit even then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import nlargest
from typing import TYPE_CHECKING

from vllm.v1.request import Request, RequestStatus

from coldstart.scheduling.vllm.states import State

if TYPE_CHECKING:
    from coldstart.scheduling.vllm.scheduler import PolicyScheduler

Enst = Callable[[Request], float]
RUNNING = RequestStatus.RUNNING


class Room:
    """One step's promises; `ample` says that nobody can be evicted in this step any more."""

    def __init__(self, scheduler: PolicyScheduler) -> None:
        self.scheduler = scheduler
        self.ample = False
        self.pledged = self._promised = self._joining = 0
        self._groups = len(scheduler.kv_cache_config.kv_cache_groups)

    @property
    def free(self) -> int:
        """Blocks that are free and not promised to a picked request."""
        blocks: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return blocks - self._promised

    def make(self, picked: list[Request], enst: Enst) -> list[Request]:
        """Evict what is needed; the picked requests that can be held now, in rank order."""
        self._promise([])
        heavy = [request for request in picked if request.status != RUNNING or request.is_prefill_chunk]
        joining = [request for request in heavy if request.status != RUNNING]
        self.ample = self._ample(picked, heavy, joining, enst)
        if not self.ample:
            return self._within_budget(self._fitted(picked, enst))
        if heavy or len(picked) > self.scheduler.max_num_scheduled_tokens:
            return self._within_budget(picked)
        return picked

    def needs(self, request: Request) -> int:
        """Further blocks until the request holds all its tokens and the next one."""
        scheduler = self.scheduler
        remaining: int = scheduler._request_remaining_blocks(request)
        growth: int = scheduler.kv_cache_manager.watermark_blocks if request.status != RUNNING else 0
        return remaining + growth + self._groups

    def evictable(self) -> Iterator[Request]:
        scheduler = self.scheduler
        for request in scheduler.started:
            if request.request_id not in scheduler.fresh and scheduler._request_blocks_can_be_freed(request):
                yield request

    def evict(self, request: Request) -> None:
        scheduler = self.scheduler
        scheduler.started.discard(request)
        scheduler._preempt_request(
            request, scheduler.clock(), drop_stale_output=scheduler.requires_kv_delivery
        )

    def victims(self, spared: Iterable[Request], enst: Enst) -> list[Request]:
        """Requests that may leave, the largest ENST last."""
        kept = set(spared)
        return sorted((request for request in self.evictable() if request not in kept), key=enst)

    def held(self, requests: Iterable[Request]) -> int:
        """Blocks that evicting the requests gives back at most (shared ones may stay)."""
        manager = self.scheduler.kv_cache_manager
        return sum(len(group) for r in requests for group in manager.get_blocks(r.request_id).blocks)

    def _ample(self, picked: list[Request], heavy: list[Request], joining: list[Request], enst: Enst) -> bool:
        """Whether everybody fits by a cheap upper bound, which spares asking vLLM about each of them."""
        scheduler = self.scheduler
        fresh = scheduler.fresh
        pledged = sum(map(fresh.pledge, joining))
        bound = 2 * self._groups * (len(picked) - len(heavy)) + sum(map(fresh.pledge, heavy))
        if bound + scheduler.kv_cache_manager.watermark_blocks > self.free or scheduler.num_spec_tokens:
            return False
        if joining and fresh.pledged + pledged > fresh.capacity:
            return False
        if not self._slots_for(len(joining), picked, enst):
            return False
        self._promised, self._joining, self.pledged = bound, len(joining), pledged
        return True

    def _slots_for(self, joining: int, picked: list[Request], enst: Enst) -> bool:
        """Let the largest ENST go where only the model runner's slots are short."""
        short = joining - self._slots()
        if short <= 0:
            return True
        kept = set(picked)
        for victim in nlargest(short, (r for r in self.evictable() if r not in kept), key=enst):
            self.evict(victim)
        return joining <= self._slots()

    def _slots(self) -> int:
        """The model runner's slots that are free."""
        scheduler = self.scheduler
        taken = len(scheduler.started) + scheduler.num_waiting_for_streaming_input
        slots: int = scheduler.max_num_running_reqs - taken
        return slots

    def _fitted(self, picked: list[Request], enst: Enst) -> list[Request]:
        chosen: list[Request] = []
        later = list(picked)
        victims = self.victims(picked, enst)
        while later:
            request = later.pop(0)
            if self._fits(request, later, victims):
                chosen.append(request)
                self._promise(chosen)
        if picked and picked[0] not in chosen:
            return self._with_leader(picked[0], chosen, enst)
        return chosen

    def _fits(self, request: Request, later: list[Request], victims: list[Request]) -> bool:
        if request.status != RUNNING and not self.scheduler.fresh.admits(request, self.pledged):
            return False
        if self._holds(request):
            return True
        able = set(self.evictable())
        tail = [other for other in later if other in able]
        if not self._would_hold(request, [*victims, *tail]):
            return False
        while not self._holds(request) and (victims or tail):
            leaver = victims.pop() if victims else tail.pop()
            if leaver in later:
                later.remove(leaver)
            self.evict(leaver)
        return self._holds(request)

    def _holds(self, request: Request) -> bool:
        running = request.status == RUNNING
        return (running or self._slots() > self._joining) and self.needs(request) <= self.free

    def _would_hold(self, request: Request, leavers: list[Request]) -> bool:
        slots = self._slots() + len(leavers)
        enough = request.status == RUNNING or slots > self._joining
        return enough and self.needs(request) <= self.free + self.held(leavers)

    def _with_leader(self, top: Request, chosen: list[Request], enst: Enst) -> list[Request]:
        """The top of the batch is kept out by requests without a token since their admission.

        Evicting those would let two starved requests evict each other for ever, so one of them runs instead,
        first those that have a slot, and everybody with a token makes way for it.
        """
        scheduler = self.scheduler
        holders = [scheduler.requests[name] for name in scheduler.fresh]
        able = [r for state in (State.RUNNING, State.LOADED) for r in holders if scheduler.state(r) is state]
        leader = able[0] if able else top
        if leader in chosen:
            return chosen
        chosen = chosen[: scheduler.batch - 1]
        self._promise(chosen)
        for victim in reversed(self.victims([leader, *chosen], enst)):
            if not self._holds(leader):
                self.evict(victim)
        while chosen and not self._holds(leader):
            dropped = chosen.pop()
            self._promise(chosen)
            if dropped in set(self.evictable()):
                self.evict(dropped)
        if not self._holds(leader):
            return chosen
        chosen = [leader, *chosen]
        self._promise(chosen)
        return chosen

    def _promise(self, chosen: list[Request]) -> None:
        joining = [request for request in chosen if request.status != RUNNING]
        self._promised = sum(map(self.needs, chosen))
        self._joining = len(joining)
        self.pledged = sum(self.scheduler.fresh.pledge(request) for request in joining)

    def _within_budget(self, chosen: list[Request]) -> list[Request]:
        """Stop where the token budget ends: vLLM serves running requests first, whatever their rank."""
        left: int = self.scheduler.max_num_scheduled_tokens
        for position, request in enumerate(chosen):
            if left <= 0:
                return chosen[:position]
            left -= request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
        return chosen
