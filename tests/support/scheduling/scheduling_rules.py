"""Check the scheduler's invariants at each of its decisions.

6  No ready job of higher rank idles while a lower one runs. Exceptions: evicting all evictable requests does not free
   enough memory for it; its pledge does not fit beside the requests without a token; the token budget is spent; it was
   evicted in this step, or it would join below a request that was.
7  A request gains a token between two evictions.
10 Evictions go by descending ENST, loads by ascending ENST. No request is evicted to load one of larger ENST.
11 No request is evicted while its token is in a pipeline's stages.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from vllm.v1.request import Request, RequestStatus

from coldstart.vllm.scheduling.scheduler import PolicyScheduler
from coldstart.vllm.scheduling.view import Enst

RUNNING = RequestStatus.RUNNING


class Rules:
    """Wrapper of one scheduler's decisions; raises AssertionError in the step that breaks an invariant."""

    def __init__(self, scheduler: PolicyScheduler, in_flight: Callable[[], set[str]] = set) -> None:
        self.scheduler, self.in_flight = scheduler, in_flight
        self.chosen: list[Request] = []
        self.evicted_at: dict[str, int] = {}
        self._left: set[Request] = set()
        self._making: tuple[set[Request], Enst] | None = None
        self._loading: tuple[Request, set[Request], Enst] | None = None
        self.room = room = scheduler.placement.room
        loads = scheduler.placement.loads
        self._make, self._loads = room.allocate, loads.choose
        self._way, self._preempt = loads._evict_for, scheduler._preempt_request
        room.allocate, loads.choose, loads._evict_for = self.make, self.loads, self.make_way
        scheduler._preempt_request = self.preempt

    def make(self, picked: list[Request], enst: Enst) -> list[Request]:
        self._making = set(picked), enst
        started = [r for r in picked if r.status == RUNNING]
        self.chosen = self._make(picked, enst)
        self._making = None
        self._left = {r for r in started if r.status != RUNNING}
        for position, request in enumerate(picked):
            if request not in self.chosen:
                self._excused(request, picked[:position], self._led(picked))
        return self.chosen

    def _led(self, picked: list[Request]) -> set[Request]:
        """Return the request without a token that may run before the first picked request, if any."""
        if not self.chosen or picked[0] in self.chosen:
            return set()
        return {r for r in self.chosen[:1] if r.request_id in self.scheduler.fresh}

    def loads(self, chosen: list[Request], enst: Enst, now: float) -> list[Request]:
        started = self._loads(chosen, enst, now)
        order = list(map(enst, started))
        assert order == sorted(order), "loads out of the order of ENST"
        return started

    def make_way(self, request: Request, need: int, kept: list[Request], enst: Enst) -> None:
        self._loading = request, set(kept), enst
        self._way(request, need, kept, enst)
        self._loading = None
        room = self.room
        later = [r for r in room.list_evictable() if r not in kept and enst(r) > enst(request)]
        assert room.free_blocks >= need or room.free_blocks + self._freed(later) < need, (
            f"{request.request_id} waits on the host while requests of larger ENST hold its blocks"
        )

    def preempt(self, request: Request, *args: Any, **kwargs: Any) -> None:
        tokens = request.num_tokens + request.num_output_placeholders
        before = self.evicted_at.get(request.request_id, -1)
        assert tokens > before, f"{request.request_id} evicted twice without a token in between"
        self.evicted_at[request.request_id] = tokens
        assert request.request_id not in self.in_flight(), f"{request.request_id} left a batch in flight"
        self._in_order(request)
        self._preempt(request, *args, **kwargs)

    def _in_order(self, victim: Request) -> None:
        room = self.room
        if self._loading is not None:
            request, kept, enst = self._loading
            assert enst(victim) > enst(request), "evicted to load a request of larger ENST"
            others = [enst(r) for r in room.list_evictable() if r not in kept and r is not victim]
        elif self._making is not None:
            picked, enst = self._making
            others = [enst(r) for r in room.list_evictable() if r not in picked and r is not victim]
            if victim in picked:
                assert not others or self.scheduler.fresh, "the batch's tail left before those outside it"
                return
        else:
            raise AssertionError("vLLM had to evict by itself: the promised blocks were not enough")
        assert enst(victim) >= max(others, default=0.0), "victims out of the order of ENST"

    def _excused(self, request: Request, above: list[Request], led: set[Request]) -> None:
        """Check that a picked request idles only if no lower request runs or if its memory does not fit."""
        scheduler, room = self.scheduler, self.room
        higher = [*led, *(r for r in above if r in self.chosen)]
        below = [r for r in self.chosen if r not in above and r not in led]
        if not below or self._tokens(higher) >= scheduler.max_num_scheduled_tokens:
            return
        if request in self._left or (request.status != RUNNING and self._left.intersection(above)):
            assert all(r.status == RUNNING for r in below), "a request joined below an evicted one"
            return
        joining = [r for r in higher if r.status != RUNNING]
        fresh = scheduler.fresh
        pledged = fresh.pledged + sum(map(fresh.pledge, joining))
        if request.status != RUNNING and pledged + fresh.pledge(request) > fresh.capacity:
            return
        leavers = [r for r in room.list_evictable() if r not in (*above, *led, request)]
        slots = scheduler.max_num_running_reqs - len(scheduler.started) + len(leavers) - len(joining)
        if request.status != RUNNING and slots <= 0:
            return
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        free += self._freed(leavers) - sum(map(room.needs, higher))
        assert room.needs(request) > free, f"{request.request_id} idles while lower ranks run"

    def _tokens(self, requests: Iterable[Request]) -> int:
        return sum(r.num_tokens + r.num_output_placeholders - r.num_computed_tokens for r in requests)

    def _freed(self, requests: Iterable[Request]) -> int:
        """Return the number of blocks that only these requests hold."""
        manager = self.scheduler.kv_cache_manager
        groups = (group for r in requests for group in manager.get_blocks(r.request_id).blocks)
        holders = Counter(block.block_id for group in groups for block in group)
        blocks = manager.block_pool.blocks
        return sum(blocks[number].ref_cnt == count for number, count in holders.items())
