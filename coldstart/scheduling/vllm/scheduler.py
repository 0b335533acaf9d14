"""Skip-join MLFQ on vLLM's asynchronous scheduler (FastServe, sections 4.1 and 4.2).

Invariants: at most B requests are scheduled per step and only picked ones; a request that is not picked keeps
its blocks in vLLM's running list behind the gate `next_decode_eligible_step`, or waits unseen; vLLM's own
victim, the end of the running list, is the request of largest ENST.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from coldstart.scheduling import Job, SkipJoinMlfq, make_policy, pick
from coldstart.scheduling.reserve import ArrivalReserve
from coldstart.scheduling.vllm import compat
from coldstart.scheduling.vllm.config import SchedulerSettings
from coldstart.scheduling.vllm.counters import Counters, Exporter
from coldstart.scheduling.vllm.host import HostKv
from coldstart.scheduling.vllm.queue import PickedQueue
from coldstart.scheduling.vllm.room import Room
from coldstart.scheduling.vllm.states import State, state_of

PARKED = 1 << 62
"""A step number that is never reached."""


class PolicyScheduler(AsyncScheduler):
    """Runs the chosen policy before every schedule(); see config.SchedulerSettings for its settings."""

    clock: Callable[[], float] = staticmethod(time.monotonic)

    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        compat.check(AsyncScheduler.__mro__[1], Request, self.vllm_config)
        self.settings = SchedulerSettings.read(self.vllm_config.additional_config)
        self.profile = self.settings.iteration_profile()
        self.ranking = make_policy(self.settings.policy, self.profile, self.settings.mlfq())
        self.batch = min(self.settings.batch or self.max_num_active_reqs, self.max_num_running_reqs)
        self.waiting = self.picked_new = PickedQueue()
        self.kv_holding_waiting = self.picked_holding = PickedQueue()
        self.jobs: dict[str, Job] = {}
        # Admitted or loading, without a token since; in order of admission.
        self.fresh: dict[str, None] = {}
        self.counters, self.exporter = Counters(), Exporter()
        self.host = HostKv(self.connector, self.kv_cache_manager)
        self.reserve = ArrivalReserve(self.settings.load_latency_s, self.settings.reserve_quantile)
        self.room = Room(self)
        self._last_step_s: float | None = None

    def add_request(self, request: Request) -> None:
        known = request.request_id in self.requests
        super().add_request(request)
        if known or request.request_id not in self.requests:
            return
        now = self.clock()
        cached = self.kv_cache_manager.get_computed_blocks(request)[1]
        job = Job(request.request_id, now, request.num_prompt_tokens, None, cached, request.priority)
        self.jobs[job.id] = job
        self.ranking.add(job, now)
        self.reserve.arrived(self._request_remaining_blocks(request), now)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        now = self.clock()
        self._prepare(now)
        before = {request.request_id for request in self.running}
        output = super().schedule(throttle_prefills)
        self._book(output, before, now)
        return output

    def state(self, request: Request) -> State:
        return state_of(request, self.finished_recving_kv_req_ids)

    def ready(self, job: Job) -> bool:
        """Can run if picked. A request whose KV the host holds is not: its load comes first."""
        request = self.requests[job.id]
        state = self.state(request)
        if state is State.HOST:
            return self.host.hit(request) == 0
        return state in (State.NEW, State.RUNNING, State.LOADED)

    def _prepare(self, now: float) -> None:
        self.ranking.tick(now, self.batch)
        picked = pick(self.ranking, self.batch, self.ready, self.settings.oldest_share)
        order = self.ranking.enst(now, self.batch)
        enst = lambda request: order(self.jobs[request.request_id])  # noqa: E731
        chosen = self.room.make([self.requests[job.id] for job in picked], enst)
        self._arrange(chosen, enst)
        self._show(chosen, self.room.loads(chosen, enst, now))

    def _arrange(self, chosen: list[Request], enst: Callable[[Request], float]) -> None:
        """Picked requests lead in rank order; the others are parked, the next vLLM would evict last."""
        rank = {request.request_id: position for position, request in enumerate(chosen)}
        for request in self.running:
            picked = request.request_id in rank
            self.counters.parks += not picked and request.next_decode_eligible_step != PARKED
            request.next_decode_eligible_step = 0 if picked else PARKED
        last = len(rank)

        def place(request: Request) -> tuple[int, bool, float]:
            position = rank.get(request.request_id, last)
            return position, request.request_id not in self.fresh, 0.0 if position < last else enst(request)

        self.running.sort(key=place)

    def _show(self, chosen: list[Request], loads: list[Request]) -> None:
        waiting = [request for request in chosen if request.status != RequestStatus.RUNNING]
        self.picked_holding.show(waiting)
        self.picked_new.show([*(r for r in waiting if r not in self.kv_holding_waiting), *loads])
        self.host.load_only(loads)
        slots = len(self.running) + self.num_waiting_for_streaming_input + len(waiting)
        # One more, or the admission loop would stop before it reaches the loads, which take no slot.
        self.max_num_active_reqs = slots + bool(loads)

    def _book(self, output: SchedulerOutput, before: set[str], now: float) -> None:
        scheduled = output.num_scheduled_tokens
        for request in self.running:
            if request.request_id not in before:
                self.fresh.setdefault(request.request_id)
                self.host.forget(request.request_id)
        decode_s = self.profile.decode(len(scheduled))
        for request_id, tokens in scheduled.items():
            self._serve(self.requests[request_id], tokens, decode_s, now)
        for request in self.kv_holding_waiting:
            if request.request_id not in self.fresh:
                self.host.forget(request.request_id)
                self.fresh.setdefault(request.request_id)
                self.counters.loads += 1
                self.counters.blocks_loaded += sum(
                    map(len, self.kv_cache_manager.get_block_ids(request.request_id))
                )
        self._count(now)

    def _serve(self, request: Request, tokens: int, decode_s: float, now: float) -> None:
        job = self.jobs[request.request_id]
        prefill = tokens > 1 or job.generated == 0
        cost = self.profile.prefill(tokens) if prefill else decode_s
        job.generated = request.num_tokens + request.num_output_placeholders - job.prompt_tokens
        job.computed = request.num_computed_tokens
        if not request.is_prefill_chunk:
            self.fresh.pop(job.id, None)
        self.ranking.served(job, cost, now)

    def _count(self, now: float) -> None:
        step_s = 0.0 if self._last_step_s is None else now - self._last_step_s
        self._last_step_s = now
        self.counters.blocked_on_loads_s += step_s * self.room.waiting_for_loads
        if isinstance(self.ranking, SkipJoinMlfq):
            self.counters.demotions, self.counters.promotions = (
                self.ranking.demotions,
                self.ranking.promotions,
            )
            self.exporter.publish(self.counters, self.ranking.queues.counts())

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        job = self.jobs.pop(request.request_id, None)
        if job is not None:
            self.ranking.remove(job)
        self.fresh.pop(request.request_id, None)
        self.host.forget(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self.counters.evictions += 1
        self.counters.blocks_evicted += sum(map(len, self.kv_cache_manager.get_block_ids(request.request_id)))
        self.fresh.pop(request.request_id, None)
        super()._preempt_request(request, *args, **kwargs)
        request.next_decode_eligible_step = 0
        self.jobs[request.request_id].computed = 0
        self.host.forget(request.request_id)
