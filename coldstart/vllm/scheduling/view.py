"""vLLM's scheduler as placement and the express lane see it: its pool, its slots, and what the host holds.

Invariant: every answer is vLLM's own, read when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus

from coldstart.scheduling.job import Job
from coldstart.vllm.scheduling.flight import to_come, unscheduled
from coldstart.vllm.scheduling.states import State, all_in_flight

if TYPE_CHECKING:
    from coldstart.vllm.scheduling.scheduler import PolicyScheduler

RUNNING, PREEMPTED = RequestStatus.RUNNING, RequestStatus.PREEMPTED
LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS


class PoolView:
    """Blocks: what a request holds, what it needs, what is free."""

    def __init__(self, engine: AsyncScheduler, batch: int) -> None:
        self._engine = engine
        manager = engine.kv_cache_manager
        self._pool = manager.block_pool
        self.batch = batch
        self.capacity: int = manager.block_pool.num_gpu_blocks - 1
        self.watermark: int = manager.watermark_blocks
        self.groups: int = len(engine.kv_cache_config.kv_cache_groups)
        self.speculates = bool(engine.num_spec_tokens)
        self.block_tokens: int = engine.block_size
        specs = [group.kv_cache_spec for group in engine.kv_cache_config.kv_cache_groups]
        self._plain = not self.speculates and len(specs) == 1 and isinstance(specs[0], FullAttentionSpec)

    def runs(self, request: Request) -> bool:
        return bool(request.status == RUNNING)

    def free_blocks(self) -> int:
        blocks: int = self._pool.get_num_free_blocks()
        return blocks

    def needs(self, request: Request) -> int:
        return self.to_go_on(request) if self.runs(request) else self.to_start(request)

    def to_go_on(self, request: Request) -> int:
        """Further blocks of one that runs."""
        if self.groups > 1 or self.speculates:
            return int(self._engine._request_remaining_blocks(request)) + self.groups
        # Exact where vLLM's own answer leaves out the next token: a block for each would idle half of a small pool.
        return max(0, -(-to_come(request) // self.block_tokens) - self.held(request))

    def to_start(self, request: Request) -> int:
        """Blocks of one that does not run yet."""
        if self._plain and not request.num_computed_tokens and request.status != LOADING:
            # What vLLM's own answer comes to, at a tenth of its time: it holds nothing, whatever the prefix cache has.
            return -(-int(request.num_tokens) // self.block_tokens) + self.watermark + 1
        return int(self._engine._request_remaining_blocks(request)) + self.watermark + self.groups

    def held(self, request: Request) -> int:
        """Blocks that the request holds, alone or with others."""
        blocks = self._engine.kv_cache_manager.get_blocks(request.request_id).blocks
        return len(blocks[0]) if self.groups == 1 else sum(map(len, blocks))


class EngineView(PoolView):
    """A placement.KvView of one vLLM scheduler."""

    def __init__(self, scheduler: PolicyScheduler) -> None:
        super().__init__(scheduler, scheduler.batch)
        self._scheduler = scheduler
        self.token_budget: int = scheduler.max_num_scheduled_tokens
        # Asked once or more for everybody of a batch: no call between.
        self.request: Callable[[str], Request] = scheduler.requests.__getitem__
        self.ready: Callable[[Job], bool] = scheduler.ready

    def name(self, request: Request) -> str:
        found: str = request.request_id
        return found

    def job(self, request: Request) -> Job:
        return self._scheduler.jobs[request.request_id]

    def started(self) -> Iterator[Request]:
        return iter(self._scheduler.started)

    def proceeds(self, request: Request) -> bool:
        return self.runs(request) and not all_in_flight(request) and not self._scheduler.in_flight(request)

    def prefilling(self, requests: Sequence[Request]) -> list[Request]:
        return [r for r in requests if r.status is not RUNNING or r.is_prefill_chunk]

    def loading(self, name: str) -> bool:
        request = self._scheduler.picked_holding.get(name)
        return request is not None and self._scheduler.state(request) is State.LOADING

    def landed(self, request: Request) -> bool:
        return self._scheduler.state(request) is State.LOADED

    def leavable(self) -> Iterator[Request]:
        scheduler = self._scheduler
        freeable = scheduler._request_blocks_can_be_freed
        return (r for r in scheduler.started if freeable(r) and not scheduler.in_flight(r))

    def in_flight(self, name: str) -> bool:
        return self._scheduler.stages > 1 and self._scheduler.in_flight(self.request(name))

    def free_slots(self) -> int:
        scheduler = self._scheduler
        taken = len(scheduler.started) + scheduler.num_waiting_for_streaming_input
        slots: int = scheduler.max_num_running_reqs - taken
        return slots

    def reserved(self) -> int:
        # vLLM starts a load only where the prefills under way keep what they still need.
        blocks: int = self._scheduler._inflight_prefill_reserved_blocks()
        return blocks

    def bound(self, request: Request) -> int:
        tokens: int = request.num_tokens
        return self.groups * (tokens // self.block_tokens + 2)

    def pending(self, request: Request) -> int:
        tokens = unscheduled(request)
        if request.status == PREEMPTED and not request.num_computed_tokens:
            # What it left in the prefix cache is not computed again.
            tokens -= self._scheduler.kv_cache_manager.get_computed_blocks(request)[1]
        return tokens

    def freed(self, order: Sequence[Request]) -> Iterator[int]:
        """A block that others hold too comes free with the last of them."""
        manager = self._scheduler.kv_cache_manager
        holders: dict[int, int] = {}
        for request in order:
            freed = 0
            for block in chain.from_iterable(manager.get_blocks(request.request_id).blocks):
                left = holders.get(block.block_id, block.ref_cnt) - 1
                holders[block.block_id] = left
                freed += left == 0 and not block.is_null
            yield freed

    def evict(self, request: Request) -> None:
        scheduler = self._scheduler
        scheduler.started.discard(request)
        scheduler._preempt_request(
            request, scheduler.clock(), drop_stale_output=scheduler.requires_kv_delivery
        )

    def any_away(self) -> bool:
        return bool(self._scheduler.host.away) or bool(self._scheduler.picked_holding)

    def on_host(self, name: str) -> Request | None:
        scheduler = self._scheduler
        request = scheduler.host.away.get(name)
        if request is None or scheduler.state(request) is not State.HOST:
            return None
        return request if scheduler.host.hit(request) else None
