"""Skip-join MLFQ on vLLM's asynchronous scheduler (FastServe, sections 4.1 and 4.2).

Invariants: each step schedules at most one batch, and only picked requests. A new decision is made when a request has
arrived, ended, used its quantum or finished a load, or when an allocation failed; otherwise vLLM's schedule() continues
with the running requests. It sees only the requests to run, in rank order, and those to admit. Other requests with KV are
hidden from the running list during the step.

Under pipeline parallelism (section 4.3), vLLM schedules a batch while a stage is free, before earlier batches have
returned. Without asynchronous scheduling (model runner V1, always on the CPU platform), vLLM has no token to compute for
a request whose last token is still in flight. With asynchronous scheduling (V2), a gate excludes a scheduled request for
as many steps as there are stages. A request in flight is neither scheduled nor evicted, and it keeps its place in the
order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from coldstart.contract.environment import PROMETHEUS_MULTIPROC_DIR
from coldstart.scheduling.job import Job
from coldstart.scheduling.mlfq import SkipJoinMlfq
from coldstart.scheduling.settings import SchedulerSettings
from coldstart.vllm import compat
from coldstart.vllm.scheduling import CONNECTOR
from coldstart.vllm.scheduling.counters import PrometheusExporter, SchedulerTotals
from coldstart.vllm.scheduling.placement import Placement
from coldstart.vllm.scheduling.queue import PickedQueue, SlotHolders
from coldstart.vllm.scheduling.view import (
    LOADING,
    RUNNING,
    EngineView,
    count_safe_steps,
    count_tokens_after_flight,
    count_unscheduled_tokens,
)


def find_unsupported(config: Any) -> str | None:
    """Return a clause that lists the unsupported settings in the configuration, or None if there are none."""
    unsupported = []
    if config.scheduler_config.policy != "fcfs":
        unsupported.append(f"--scheduling-policy {config.scheduler_config.policy} (the queues are replaced)")
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector != CONNECTOR:
        unsupported.append(f"the KV connector {transfer.kv_connector} (only {CONNECTOR})")
    if not config.scheduler_config.enable_chunked_prefill:
        unsupported.append("--no-enable-chunked-prefill")
    if getattr(config.scheduler_config, "prefill_schedule_interval", 1) > 1:
        unsupported.append("--prefill-schedule-interval (it delays what the queues picked)")
    return f"the scheduler does not support {', '.join(unsupported)}" if unsupported else None


class PolicyScheduler(AsyncScheduler):
    """vLLM's asynchronous scheduler with skip-join MLFQ, configured by `scheduling.settings`."""

    clock: Callable[[], float] = staticmethod(time.monotonic)

    max_num_active_reqs: int
    running: list[Request]

    def __new__(cls, *, vllm_config: Any, **kwargs: Any) -> PolicyScheduler:
        pipeline = vllm_config.parallel_config.pipeline_parallel_size > 1
        is_synchronous = pipeline and not vllm_config.scheduler_config.async_scheduling
        scheduler: PolicyScheduler = super().__new__(_SynchronousPipelineScheduler if is_synchronous else cls)
        return scheduler

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if reason := compat.find_unsupported_reason("scheduler") or find_unsupported(self.vllm_config):
            raise RuntimeError(f"{reason}; serve with --scheduler fcfs")
        self.stages: int = self.parallel_config.pipeline_parallel_size
        self.settings = SchedulerSettings.from_additional_config(self.vllm_config.additional_config)
        self.profile = self.settings.get_iteration_profile()
        self._prefill_s = lru_cache(maxsize=8192)(self.profile.prefill)
        self.ranking = SkipJoinMlfq(self.profile, self.settings)
        self.batch = min(self.settings.batch or self.max_num_active_reqs, self.max_num_running_reqs)
        self.waiting = self.picked_new = PickedQueue()
        self.kv_holding_waiting = self.picked_holding = PickedQueue()
        self.jobs: dict[str, Job] = {}
        self.started = SlotHolders()
        self.counters = SchedulerTotals()
        self.exporter = PrometheusExporter() if PROMETHEUS_MULTIPROC_DIR.read() else None
        self.view = EngineView(self)
        self.placement = Placement(
            self.view, self.ranking, self.jobs, self.settings, keeps_kv=self.connector is not None
        )
        self.fresh = self.placement.fresh
        self._load_started_s: dict[str, float] = {}
        self._last_step_s: float | None = None
        self._reusable_steps, self._has_sessions = 0, False
        self._in_schedule = self._running_changed = False

    def is_in_flight(self, request: Request) -> bool:
        """Return whether the request's next step needs a token that an earlier batch is still computing.

        This is always False without pipeline parallelism, because vLLM's async scheduling does not wait for that token.
        """
        if self.stages == 1 or request.status is not RUNNING:
            return False
        gate: int = request.next_decode_eligible_step
        return not count_unscheduled_tokens(request) or self.current_step + 1 < gate

    def add_request(self, request: Request) -> None:
        known = request.request_id in self.requests
        super().add_request(request)
        if known or request.request_id not in self.requests:
            return
        self._has_sessions |= request.resumable
        now = self.clock()
        if not self.jobs:
            self._last_step_s = None  # no request has run since the last step
        cached = self.kv_cache_manager.get_computed_blocks(request)[1]
        job = Job(request.request_id, now, request.num_prompt_tokens, cached, request.priority)
        self.placement.add(job, self._request_remaining_blocks(request), now)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        now = self.clock()
        self._account_time(now)
        if not self._can_reuse_decision(now):
            self._make_decision(now)
        all_running, self.running = self.running, self.started.active
        shown, self._in_schedule = len(self.running), True
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self._in_schedule, self.started.active = False, self.running
            admitted = self.running[shown:]
            all_running += admitted
            self.running = all_running
            if self._running_changed:
                self.running, self._running_changed = list(self.started), False
        self._record_step(output, admitted, now)
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        report = model_runner_output.kv_connector_output
        if report is not None and report.finished_recving:
            self.placement.invalidate()
            for request_id in report.finished_recving & self._load_started_s.keys():
                self.placement.reserve.add_load_time(self.clock() - self._load_started_s.pop(request_id))
        return super().update_from_output(scheduler_output, model_runner_output)

    def _can_reuse_decision(self, now: float) -> bool:
        """Return whether the last decision can be reused for this step."""
        if self.stages > 1 or self._has_sessions or not self.placement.is_current(now):
            return False
        if self._reusable_steps < 0:
            self._reusable_steps = min(map(count_safe_steps, self.started.active), default=0)
        self._reusable_steps -= 1
        return self._reusable_steps >= 0

    def _make_decision(self, now: float) -> None:
        """Make a new decision, and show the chosen requests to vLLM."""
        self.started.refresh()
        chosen, loads = self.placement.decide(now)
        running = [request for request in chosen if request.status is RUNNING]
        joining = [request for request in chosen if request.status is not RUNNING]
        self.counters.parks += self.started.activate_only(running, self.is_in_flight)
        self.picked_holding.show(joining if len(self.picked_holding) else ())
        self.picked_new.show([*joining, *loads])
        if self.connector is not None:
            self.connector.load_only = {request.request_id for request in loads}
        slots = len(self.started.active) + self.num_waiting_for_streaming_input + len(joining)
        # Add one, or the admission loop would stop before the loads, which need no slot.
        self.max_num_active_reqs = slots + bool(loads)
        self._reusable_steps = -1

    def _record_step(self, output: SchedulerOutput, admitted: list[Request], now: float) -> None:
        scheduled = output.num_scheduled_tokens
        decode_s = self.profile.decode(len(scheduled))
        names = list(scheduled)
        others = len(names) - len(admitted)
        if self._is_decode_step(output, admitted, others):
            self.ranking.add_decode_step(list(map(self.jobs.__getitem__, names[:others])), decode_s, now)
            names = names[others:]
        for request in admitted:
            if request.is_prefill_chunk:
                self.fresh.add(request)
            if self.connector is not None:
                self.connector.discard(request.request_id)
        for name in names:
            self._record_service(self.requests[name], scheduled[name], decode_s, now)
        if self.connector is not None:
            for request in self.picked_holding:
                if request.status is LOADING and request.request_id not in self.fresh:
                    self._load_started_s[request.request_id] = now
                    self.connector.discard(request.request_id)
                    self.fresh.add(request)
                    self.counters.loads += 1
        if len(scheduled) != len(self.started.active):
            self.placement.invalidate()
        self._publish()

    def _is_decode_step(self, output: SchedulerOutput, admitted: list[Request], others: int) -> bool:
        """Return whether each request that was already running got exactly one decode token."""
        scheduled = output.num_scheduled_tokens
        tokens = output.total_num_scheduled_tokens - sum(scheduled[r.request_id] for r in admitted)
        return tokens == others and not self.view.speculates and scheduled.keys().isdisjoint(self.fresh)

    def _record_service(self, request: Request, tokens: int, decode_s: float, now: float) -> None:
        job = self.jobs[request.request_id]
        prefill = tokens > 1 or job.generated_tokens == 0
        cost = self._prefill_s(tokens) if prefill else decode_s
        job.generated_tokens = count_tokens_after_flight(request) - job.prompt_tokens
        job.computed_tokens = request.num_computed_tokens
        job.is_within_prompt = request.is_prefill_chunk
        if not request.is_prefill_chunk:
            self.fresh.discard(job.id)
        self.ranking.add_service(job, cost, now)

    def _account_time(self, now: float) -> None:
        """Attribute the time since the last step to that step's decision."""
        step_s = 0.0 if self._last_step_s is None else now - self._last_step_s
        self._last_step_s = now
        self.placement.turns.add_time(step_s)

    def _publish(self) -> None:
        self.counters.demotions = self.ranking.demotions
        self.counters.promotions = self.ranking.promotions
        if self.exporter is not None:
            self.exporter.publish(self.counters, list(map(len, self.ranking.queues)))

    def _evict(self, request: Request) -> None:
        self._preempt_request(request, self.clock(), drop_stale_output=self.requires_kv_delivery)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self.placement.remove(request.request_id)
        self.started.parked.pop(request, None)
        self._running_changed |= self._in_schedule
        if self.connector is not None:
            self.connector.discard(request.request_id)
        self._load_started_s.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self.counters.evictions += 1
        self.counters.blocks_evicted += self.view.count_blocks(request)
        self.placement.invalidate()
        self.started.discard(request)
        self._running_changed = True
        self.fresh.discard(request.request_id)
        super()._preempt_request(request, *args, **kwargs)
        self.jobs[request.request_id].computed_tokens = 0
        if self.connector is not None:
            self.connector.record_eviction(request)


class _SynchronousPipelineScheduler(PolicyScheduler):
    """PolicyScheduler for pipeline parallelism without asynchronous scheduling, with vLLM's synchronous bookkeeping.

    It is a separate class so that schedulers without a pipeline need no check for each token.
    """

    _update_after_schedule = Scheduler._update_after_schedule
    _update_request_with_output = Scheduler._update_request_with_output
