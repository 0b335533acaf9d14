"""Memory and slots for the picked requests on the real engine.

Invariants: blocks go to picked requests in rank order; victims leave in descending ENST, from outside the
batch first, then from its tail; between two evictions a request gains a token; nobody is evicted for a
request that would not fit even then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import nlargest
from itertools import chain
from typing import TYPE_CHECKING

from vllm.v1.request import Request, RequestStatus

from coldstart.vllm.scheduling.states import State

if TYPE_CHECKING:
    from coldstart.vllm.scheduling.scheduler import PolicyScheduler

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
        if request.status == RUNNING and self._groups == 1 and not scheduler.num_spec_tokens:
            # Exact where vLLM's own answer leaves out the next token: a block for each would idle half of a small pool.
            tokens: int = request.num_tokens + request.num_output_placeholders
            block: int = scheduler.block_size
            return max(0, -(-tokens // block) - self.held(request))
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

    def held(self, request: Request) -> int:
        """Blocks that the request holds, alone or with others."""
        return sum(map(len, self.scheduler.kv_cache_manager.get_blocks(request.request_id).blocks))

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
        waited = {request for request in picked if request.status != RUNNING}
        chosen = self._in_order(picked, enst)
        if not picked or picked[0] in chosen:
            return chosen
        leader = self._leader(picked[0])
        if leader in chosen:
            return chosen
        self._promise([])
        others = [r for r in self._staying(picked, waited) if r is not leader]
        return self._in_order([leader, *others][: self.scheduler.batch], enst)

    def _staying(self, picked: list[Request], waited: set[Request]) -> Iterator[Request]:
        """Who left in the first attempt stays out of this step, and nobody joins below it."""
        left = False
        for request in picked:
            runs = request.status == RUNNING
            left |= not runs and request not in waited
            if runs or not left:
                yield request

    def _in_order(self, picked: list[Request], enst: Enst) -> list[Request]:
        chosen: list[Request] = []
        later = list(picked)
        victims = self.victims(picked, enst)
        while later:
            request = later.pop(0)
            if self._fits(request, later, victims):
                chosen.append(request)
                self._promise(chosen)
        return chosen

    def _leader(self, top: Request) -> Request:
        """Who runs first where the top of the batch is kept out by requests without a token.

        Evicting those would let two starved requests evict each other for ever, so one of them runs instead,
        first those that have a slot, and everybody with a token makes way for it.
        """
        scheduler = self.scheduler
        holders = [scheduler.requests[name] for name in scheduler.fresh]
        able = [r for state in (State.RUNNING, State.LOADED) for r in holders if scheduler.state(r) is state]
        return able[0] if able else top

    def _fits(self, request: Request, later: list[Request], victims: list[Request]) -> bool:
        """Whether the request can be held, once those who make room for it have left."""
        joins = request.status != RUNNING
        if joins and not self.scheduler.fresh.admits(request, self.pledged):
            return False
        short = self.needs(request) - self.free
        slots = self._joining + 1 - self._slots() if joins else 0
        if short <= 0 and slots <= 0:
            return True
        able = set(self.evictable())
        order = [*reversed(victims), *(other for other in reversed(later) if other in able)]
        leavers = self.leavers(order, short, slots)
        for leaver in leavers:
            self.evict(leaver)
        del victims[max(0, len(victims) - len(leavers)) :]
        cut = min((later.index(leaver) for leaver in leavers if leaver in later), default=len(later))
        # Nobody joins below a request that had to leave the batch.
        later[cut:] = [other for other in later[cut:] if other.status == RUNNING]
        return bool(leavers)

    def leavers(self, order: list[Request], short: int, slots: int) -> list[Request]:
        """The first few whose leaving frees enough blocks and slots; nobody if all of them would not."""
        manager = self.scheduler.kv_cache_manager
        holders: dict[int, int] = {}
        for count, request in enumerate(order, 1):
            for block in chain.from_iterable(manager.get_blocks(request.request_id).blocks):
                left = holders.get(block.block_id, block.ref_cnt) - 1
                holders[block.block_id] = left
                short -= left == 0 and not block.is_null
            if short <= 0 and count >= slots:
                return order[:count]
        return []

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
