"""Memory for the picked requests on the real engine, and which loads to start.

Invariants: blocks go to picked requests in rank order; victims leave in descending ENST; between two
evictions a request gains a token, unless one admitted before it needs its blocks; loads start in ascending
ENST and never take what the picked need, nor, unless their rank earns a slot, the reserve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from vllm.v1.request import Request, RequestStatus

from coldstart.scheduling.vllm.states import State

if TYPE_CHECKING:
    from coldstart.scheduling.vllm.scheduler import PolicyScheduler

Enst = Callable[[Request], float]


class Room:
    def __init__(self, scheduler: PolicyScheduler) -> None:
        self.scheduler = scheduler
        self.waiting_for_loads = 0
        self._promised = self._joining = 0

    @property
    def free(self) -> int:
        """Blocks that are free and not promised to a picked request."""
        blocks: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return blocks - self._promised

    def make(self, picked: list[Request], enst: Enst) -> list[Request]:
        """Evict what is needed; the picked requests that can be held now, in rank order."""
        self._promised = self._joining = 0
        if self._roomy(picked):
            return self._within_budget(picked)
        chosen: list[Request] = []
        later = list(picked)
        victims = self._victims({request.request_id for request in picked}, enst)
        while later:
            request = later.pop(0)
            if self._fits(request, later, victims):
                self._promised += self._needs(request)
                self._joining += request.status != RequestStatus.RUNNING
                chosen.append(request)
        if picked and picked[0] not in chosen:
            chosen = self._with_leader(picked[0], chosen)
        return self._within_budget(chosen)

    def loads(self, chosen: list[Request], enst: Enst, now: float) -> list[Request]:
        """Requests on the host whose load to start now: those whose rank earns a slot, then the soonest."""
        scheduler = self.scheduler
        self.waiting_for_loads = 0
        if scheduler.connector is None:
            return []
        due, others = self._hosted(chosen)
        self.waiting_for_loads = len(due)
        if scheduler.settings.strategy != "proactive":
            others = []
        if due and not chosen and not self._loading():
            self._make_way(due[0], [due[0]])
        # vLLM starts a load only where the prefills under way keep what they still need.
        spare = self.free - scheduler._inflight_prefill_reserved_blocks()
        first = self._fitting(sorted(due, key=enst), spare)
        used = sum(map(self._needs, first))
        spare -= used + scheduler.reserve.blocks(now)
        return first + self._fitting(sorted(others, key=enst), spare)

    def _fits(self, request: Request, later: list[Request], victims: list[Request]) -> bool:
        while not self._holds(request):
            if victims:
                self._evict(victims.pop())
            elif not self._evict_last(later):
                return False
        return True

    def _roomy(self, picked: list[Request]) -> bool:
        """Whether everybody fits by a cheap upper bound, which spares asking vLLM about each of them."""
        scheduler = self.scheduler
        groups = len(scheduler.kv_cache_config.kv_cache_groups)
        bound = 0
        for request in picked:
            if request.status == RequestStatus.RUNNING and not request.is_prefill_chunk:
                bound += 2 * groups
            else:
                self._joining += request.status != RequestStatus.RUNNING
                bound += groups * (request.num_tokens // scheduler.block_size + 2)
        slots = (
            scheduler.max_num_running_reqs
            - len(scheduler.running)
            - scheduler.num_waiting_for_streaming_input
        )
        margin = scheduler.kv_cache_manager.watermark_blocks
        if bound + margin <= self.free and self._joining <= slots and not scheduler.num_spec_tokens:
            self._promised = bound
            return True
        self._joining = 0
        return False

    def _holds(self, request: Request) -> bool:
        running = request.status == RequestStatus.RUNNING
        return (running or self._slot_left()) and self._needs(request) <= self.free

    def _with_leader(self, top: Request, chosen: list[Request]) -> list[Request]:
        """The top of the batch is kept out by requests without a token since their admission.

        Evicting those would let two starved requests evict each other for ever, so the one admitted first
        runs instead, and the later ones make way for it.
        """
        scheduler = self.scheduler
        holders = (scheduler.requests[name] for name in scheduler.fresh)
        able = (State.RUNNING, State.LOADED)
        leader = next((request for request in holders if scheduler.state(request) in able), top)
        if leader in chosen:
            return chosen
        chosen = chosen[: scheduler.batch - 1]
        self._promised = sum(map(self._needs, chosen))
        self._joining = sum(request.status != RequestStatus.RUNNING for request in chosen)
        self._make_way(leader, [leader, *chosen])
        while chosen and not self._holds(leader):
            dropped = chosen.pop()
            self._promised -= self._needs(dropped)
            self._joining -= dropped.status != RequestStatus.RUNNING
            self._make_way(leader, [leader, *chosen])
        if not self._holds(leader):
            return chosen
        self._promised += self._needs(leader)
        return [leader, *chosen]

    def _within_budget(self, chosen: list[Request]) -> list[Request]:
        """Stop where the token budget ends: vLLM serves running requests first, whatever their rank."""
        left: int = self.scheduler.max_num_scheduled_tokens
        for position, request in enumerate(chosen):
            if left <= 0:
                return chosen[:position]
            left -= request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
        return chosen

    def _make_way(self, request: Request, kept: list[Request]) -> None:
        """Take blocks from anybody else: parked requests, then the latest admitted, loaded ones included."""
        scheduler = self.scheduler
        spared = {other.request_id for other in kept}
        parked = [r for r in scheduler.running if r.request_id not in scheduler.fresh]
        victims = parked + [scheduler.requests[name] for name in reversed(scheduler.fresh)]
        for victim in victims:
            if self._holds(request):
                return
            if victim.request_id not in spared:
                self._take_from(victim)

    def _take_from(self, victim: Request) -> None:
        if victim.status == RequestStatus.RUNNING:
            if self.scheduler._request_blocks_can_be_freed(victim):
                self._evict(victim)
        elif self.scheduler.state(victim) is State.LOADED:
            self._unload(victim)

    def _slot_left(self) -> bool:
        """Whether the model runner has a slot beyond the running requests and those about to join them."""
        scheduler = self.scheduler
        taken = len(scheduler.running) + scheduler.num_waiting_for_streaming_input + self._joining
        return bool(taken < scheduler.max_num_running_reqs)

    def _needs(self, request: Request) -> int:
        """Further blocks until the request holds all its tokens and the next one."""
        scheduler = self.scheduler
        remaining: int = scheduler._request_remaining_blocks(request)
        growth: int = (
            scheduler.kv_cache_manager.watermark_blocks if request.status != RequestStatus.RUNNING else 0
        )
        return remaining + growth + len(scheduler.kv_cache_config.kv_cache_groups)

    def _victims(self, spared: set[str], enst: Enst) -> list[Request]:
        """Parked requests that may leave, the largest ENST last."""
        return sorted((r for r in self._evictable() if r.request_id not in spared), key=enst)

    def _evict_last(self, later: list[Request]) -> bool:
        """Take the blocks of the batch's own tail; it is not picked this step."""
        holders = {request.request_id for request in self._evictable()}
        for position in range(len(later) - 1, -1, -1):
            if later[position].request_id in holders:
                self._evict(later.pop(position))
                return True
        return False

    def _evictable(self) -> Iterator[Request]:
        scheduler = self.scheduler
        for request in scheduler.running:
            protected = request.request_id in scheduler.fresh
            if not protected and scheduler._request_blocks_can_be_freed(request):
                yield request

    def _evict(self, request: Request) -> None:
        scheduler = self.scheduler
        scheduler.running.remove(request)
        scheduler._preempt_request(
            request, scheduler.clock(), drop_stale_output=scheduler.requires_kv_delivery
        )

    def _unload(self, request: Request) -> None:
        scheduler = self.scheduler
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            scheduler._update_waiting_for_remote_kv(request)
        scheduler.kv_holding_waiting.remove_request(request)
        started = request.num_preemptions
        request.status = RequestStatus.RUNNING
        scheduler._preempt_request(
            request, scheduler.clock(), drop_stale_output=scheduler.requires_kv_delivery
        )
        if not started:
            # The workers have never seen it: resuming it as preempted would skip sending them its prompt.
            request.status, request.num_preemptions = RequestStatus.WAITING, 0

    def _hosted(self, chosen: list[Request]) -> tuple[list[Request], list[Request]]:
        """Requests on the host: those within the first B ranks, and the rest of a bounded look ahead."""
        scheduler = self.scheduler
        due: list[Request] = []
        others: list[Request] = []
        for position, job in enumerate(islice(scheduler.ranking, 4 * scheduler.batch)):
            request = scheduler.requests[job.id]
            if scheduler.state(request) is State.HOST and scheduler.host.hit(request):
                (due if position < scheduler.batch else others).append(request)
        return due, others

    def _loading(self) -> bool:
        return any(
            self.scheduler.state(request) is State.LOADING for request in self.scheduler.kv_holding_waiting
        )

    def _fitting(self, requests: list[Request], spare: int) -> list[Request]:
        fitting = []
        for request in requests:
            spare -= self._needs(request)
            if spare < 0:
                break
            fitting.append(request)
        return fitting
