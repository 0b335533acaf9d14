"""Skip-join MLFQ on vLLM's asynchronous scheduler (FastServe, sections 4.1 and 4.2).

Invariants: at most B requests are scheduled per step and only picked ones; a request that is not picked keeps
its blocks in vLLM's running list behind the gate `next_decode_eligible_step`, or waits unseen; vLLM's own
victim, the end of the running list, is the request of largest ENST. Where nobody can be evicted, because
memory is ample, vLLM does not get to see the parked requests, so that a step costs what its batch costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from coldstart.scheduling import Job, SchedulerSettings, SkipJoinMlfq, make_policy
from coldstart.scheduling.placement import Enst, Placement
from coldstart.vllm.scheduling import limits
from coldstart.vllm.scheduling.counters import Counters, Exporter
from coldstart.vllm.scheduling.events import Events
from coldstart.vllm.scheduling.flight import PipelinedScheduler, to_come
from coldstart.vllm.scheduling.host import HostKv
from coldstart.vllm.scheduling.queue import PickedQueue
from coldstart.vllm.scheduling.started import PARKED, Started
from coldstart.vllm.scheduling.states import State, all_in_flight, state_of
from coldstart.vllm.scheduling.swaps import Swaps, block_bytes
from coldstart.vllm.scheduling.view import EngineView

__all__ = ["PARKED", "PolicyScheduler"]


class PolicyScheduler(PipelinedScheduler):
    """Runs the chosen policy before every schedule(); see scheduling.settings for its settings."""

    clock: Callable[[], float] = staticmethod(time.monotonic)

    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        limits.require(self.vllm_config)
        self.settings = SchedulerSettings.read(self.vllm_config.additional_config)
        limits.require_policy(self.settings.policy, express=False)
        self.profile = self.settings.iteration_profile()
        self.ranking = make_policy(self.settings.policy, self.profile, self.settings)
        self.batch = min(self.settings.batch or self.max_num_active_reqs, self.max_num_running_reqs)
        self.waiting = self.picked_new = PickedQueue()
        self.kv_holding_waiting = self.picked_holding = PickedQueue()
        self.jobs: dict[str, Job] = {}
        self.started = Started()
        self.counters, self.exporter = Counters(), Exporter(Counters)
        self.events = Events.enabled()
        self.ranking.observer = self.events
        self.swaps = Swaps(self.counters, block_bytes(self.vllm_config, self.kv_cache_config), self.events)
        self.host = HostKv(self.connector, self.kv_cache_manager)
        self.view = EngineView(self)
        self.placement = Placement(
            self.view, self.ranking, self.jobs, self.settings, keeps_kv=self.connector is not None
        )
        self.fresh, self.room, self.loads = self.placement.fresh, self.placement.room, self.placement.loads
        self._last_step_s: float | None = None

    def add_request(self, request: Request) -> None:
        known = request.request_id in self.requests
        super().add_request(request)
        if known or request.request_id not in self.requests:
            return
        now = self.clock()
        if not self.jobs:
            self._last_step_s = None  # what has passed since then was nobody's iteration
        cached = self.kv_cache_manager.get_computed_blocks(request)[1]
        job = Job(request.request_id, now, request.num_prompt_tokens, None, cached, request.priority)
        self.placement.arrived(job, self._request_remaining_blocks(request), now)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        now = self.clock()
        self._passed(now)
        hidden = self._prepare(now)
        shown = len(self.running)
        try:
            output = super().schedule(throttle_prefills)
        finally:
            admitted = self.running[shown:]
            self.started.active += admitted
            self.running += hidden
        self._book(output, admitted, now)
        if self.connector is not None:
            self.swaps.decided(output.kv_connector_metadata)
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        if model_runner_output.kv_connector_output is not None:
            self.swaps.moved(model_runner_output.kv_connector_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def state(self, request: Request) -> State:
        return state_of(request, self.finished_recving_kv_req_ids)

    def ready(self, job: Job) -> bool:
        """Can run if picked. A request whose KV the host holds is not: its load comes first."""
        request = self.requests[job.id]
        if request.status == RequestStatus.RUNNING:
            return not (all_in_flight(request) or self.in_flight(request))
        state = self.state(request)
        if state is State.HOST:
            return self.host.hit(request) == 0
        return state is State.NEW or state is State.LOADED

    def _prepare(self, now: float) -> list[Request]:
        """Decide, arrange what vLLM sees, and return the parked requests that it does not see."""
        self.started.refresh()
        decision = self.placement.decide(now)
        self.counters.parks += self.started.arrange(decision.chosen, self.in_flight)
        self._show(decision.chosen, decision.loads)
        parked = self.started.parked
        self.running = list(self.started.active)
        if self.room.ample:
            return list(parked)
        # The requests without a token lead: vLLM evicts from the end.
        enst: Enst[Request] = self.placement.enst(now)
        self.running += sorted(parked, key=lambda r: (r.request_id not in self.fresh, enst(r)))
        return []

    def _show(self, chosen: list[Request], loads: list[Request]) -> None:
        waiting = [request for request in chosen if request.status != RequestStatus.RUNNING]
        self.picked_holding.show(waiting)
        self.picked_new.show([*(r for r in waiting if r not in self.kv_holding_waiting), *loads])
        self.host.load_only(loads)
        shown = len(self.started) if not self.room.ample else len(self.started.active)
        slots = shown + self.num_waiting_for_streaming_input + len(waiting)
        # One more, or the admission loop would stop before it reaches the loads, which take no slot.
        self.max_num_active_reqs = slots + bool(loads)

    def _book(self, output: SchedulerOutput, admitted: list[Request], now: float) -> None:
        for request in admitted:
            self.fresh.add(request)
            self.host.back(request.request_id)
        scheduled = output.num_scheduled_tokens
        decode_s = self.profile.decode(len(scheduled))
        for request_id, tokens in scheduled.items():
            self._serve(self.requests[request_id], tokens, decode_s, now)
        for request in self.picked_holding:
            if request.request_id not in self.fresh:
                self._load_started(request)
        self._publish()

    def _load_started(self, request: Request) -> None:
        self.host.back(request.request_id)
        self.fresh.add(request)
        self.counters.loads += 1

    def _serve(self, request: Request, tokens: int, decode_s: float, now: float) -> None:
        job = self.jobs[request.request_id]
        prefill = tokens > 1 or job.generated == 0
        cost = self.profile.prefill(tokens) if prefill else decode_s
        job.generated = to_come(request) - job.prompt_tokens
        job.computed = request.num_computed_tokens
        if not request.is_prefill_chunk:
            self.fresh.discard(job.id)
        self.ranking.served(job, cost, now)

    def _passed(self, now: float) -> None:
        """Book the time since the last step on what that step decided."""
        step_s = 0.0 if self._last_step_s is None else now - self._last_step_s
        self._last_step_s = now
        self.placement.turns.passed(step_s)
        self.counters.blocked_on_loads_s += step_s * len(self.loads.blocked)
        self.counters.loading_s += step_s * len(self.loads.loading)
        for request_id in self.loads.blocked:
            if request_id in self.jobs:
                self.jobs[request_id].blocked_s += step_s

    def _publish(self) -> None:
        if isinstance(self.ranking, SkipJoinMlfq):
            self.counters.demotions = self.ranking.demotions
            self.counters.promotions = self.ranking.promotions
            if self.exporter.enabled:
                self.exporter.publish(self.counters, self.ranking.queues.counts())

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self.placement.left(request.request_id)
        self.started.discard(request)
        self.host.back(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self.counters.evictions += 1
        self.counters.blocks_evicted += self.view.held(request)
        if self.events:
            self.events.note("eviction", request=request.request_id, blocks=self.view.held(request))
        self.started.discard(request)
        self.fresh.discard(request.request_id)
        super()._preempt_request(request, *args, **kwargs)
        request.next_decode_eligible_step = 0
        self.jobs[request.request_id].computed = 0
        self.host.left(request)
