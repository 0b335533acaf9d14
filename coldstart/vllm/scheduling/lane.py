"""First come, first served with an express lane on vLLM's asynchronous scheduler.

Invariants: where the lane decides nothing, vLLM's own schedule() runs on vLLM's own lists. Else it sees the requests that
are to run, in the lane's order, and those that join; whoever else holds KV is left out of the running list for the step
and put back at its end. Who is evicted waits in the order of arrival.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import Request, RequestStatus

from coldstart.scheduling import Job, SchedulerSettings
from coldstart.scheduling.express.admission import Turn
from coldstart.scheduling.express.lane import Lane
from coldstart.scheduling.express.policy import Express
from coldstart.vllm.scheduling import limits
from coldstart.vllm.scheduling.counters import Exporter, LaneCounters
from coldstart.vllm.scheduling.events import Events
from coldstart.vllm.scheduling.flight import PipelinedScheduler
from coldstart.vllm.scheduling.hints import expected_of, kind_of_request
from coldstart.vllm.scheduling.host import HostKv
from coldstart.vllm.scheduling.joining import JoiningQueue
from coldstart.vllm.scheduling.lane_view import RequestsView
from coldstart.vllm.scheduling.states import State, state_of
from coldstart.vllm.scheduling.swaps import Swaps, block_bytes

CUT = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)
"""Ends that say nothing of how long the answer would have been."""


class LaneScheduler(PipelinedScheduler):
    """`line` and `arriving` are vLLM's two waiting queues: who waits for memory or a slot, and whose KV is loaded or being
    loaded. The last `hidden` of the running list are parked or paused.
    """

    clock: Callable[[], float] = staticmethod(time.monotonic)

    max_num_active_reqs: int
    waiting: FCFSRequestQueue
    kv_holding_waiting: FCFSRequestQueue

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        limits.require(self.vllm_config)
        self.settings = SchedulerSettings.read(self.vllm_config.additional_config)
        limits.require_policy(self.settings.policy, express=True)
        self.batch = min(self.settings.batch or self.max_num_active_reqs, self.max_num_running_reqs)
        self.max_num_active_reqs = self.batch
        self.line, self.arriving = self.waiting, self.kv_holding_waiting
        self.jobs: dict[str, Job] = {}
        self.policy = Express(self.settings.iteration_profile(), self.settings)
        self.events = Events.enabled()
        self.policy.observer = self.events if self.settings.explain else None
        self.counters, self.exporter = LaneCounters(), Exporter(LaneCounters)
        self.swaps = Swaps(self.counters, block_bytes(self.vllm_config, self.kv_cache_config), self.events)
        self.host = HostKv(self.connector, self.kv_cache_manager, self._worth_loading)
        self.view = RequestsView(self)
        self.lane = Lane(self.view, self.policy, keeps_kv=self.connector is not None)
        self._sessions = False

    @property
    def hidden(self) -> int:
        return len(self.lane.parked) + len(self.lane.paused)

    def add_request(self, request: Request) -> None:
        known = request.request_id in self.requests
        super().add_request(request)
        if known or request.request_id not in self.requests:
            return
        self._sessions |= request.resumable
        now = self.clock()
        cached = self.kv_cache_manager.get_computed_blocks(request)[1]
        job = Job(request.request_id, now, request.num_prompt_tokens, None, cached)
        job.kind, job.expected = kind_of_request(request, self.settings.classes), expected_of(request)
        self.jobs[job.id] = job
        self.lane.arrived(job, now)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self._sessions:
            self._unhide_sessions()
        turn = self.lane.decide(self.clock())
        if turn is None or self._as_it_is(turn):
            shown = len(self.running)
            output = super().schedule(throttle_prefills)
            if len(self.running) > shown or self.connector is not None:
                self._began(self.running[shown:])
        elif turn.joining:
            output = self._take(turn, throttle_prefills)
        else:
            output = self._go_on(turn.running, throttle_prefills)
        self.lane.stepped(output.num_scheduled_tokens if self.lane.members else {})
        if self.connector is not None:
            self.swaps.decided(output.kv_connector_metadata)
        if self.exporter.enabled:
            self._publish()
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        if (report := model_runner_output.kv_connector_output) is not None:
            self.swaps.moved(report)
            if report.finished_recving:
                self.lane.rhythm.stir()
        return super().update_from_output(scheduler_output, model_runner_output)

    def state(self, request: Request) -> State:
        return state_of(request, self.finished_recving_kv_req_ids)

    def _as_it_is(self, turn: Turn[Request]) -> bool:
        """Whether vLLM would do by itself what was decided: the batch is full with those who run and the first in line."""
        joining, line = turn.joining, self.line
        if len(turn.running) + len(joining) != self.batch or self.hidden or self.arriving:
            return False
        if joining and not all(mine is first for mine, first in zip(joining, line, strict=False)):
            return False
        self.running = turn.running
        return True

    def _go_on(self, running: list[Request], throttle_prefills: bool) -> SchedulerOutput:
        """One step of those alone: nobody joins, since they have all the slots."""
        hidden = list(self.lane.hidden())
        self.running = running
        self.max_num_active_reqs = len(running) + self.num_waiting_for_streaming_input
        try:
            return super().schedule(throttle_prefills)
        finally:
            self.max_num_active_reqs = self.batch
            self.running += hidden

    def _take(self, turn: Turn[Request], throttle_prefills: bool) -> SchedulerOutput:
        """One step on what the lane has decided."""
        line, arriving = self.line, self.arriving
        back = set(arriving).intersection(turn.joining) if arriving else set()
        hidden = list(self.lane.hidden())
        self.running, shown = turn.running, len(turn.running)
        self.max_num_active_reqs = shown + len(turn.joining) + self.num_waiting_for_streaming_input
        self.waiting = JoiningQueue.of([r for r in turn.joining if r not in back], len(line))
        self.kv_holding_waiting = JoiningQueue.of([r for r in turn.joining if r in back], len(arriving))
        try:
            return super().schedule(throttle_prefills)
        finally:
            waiting, holding = set(self.waiting), set(self.kv_holding_waiting)
            self.waiting, self.kv_holding_waiting = line, arriving
            self.max_num_active_reqs = self.batch
            for request in turn.joining:
                self._requeue(
                    request, was_back=request in back, waits=request in waiting, holds=request in holding
                )
            self._began(self.running[shown:])
            self.running += hidden

    def _requeue(self, request: Request, *, was_back: bool, waits: bool, holds: bool) -> None:
        """Out of the queue where it was, into the one where vLLM put it."""
        if was_back and not holds:
            self.arriving.remove(request)
        elif not was_back and not waits:
            del self.line[0 if self.line[0] is request else self._place(request)]
        if holds and not was_back:
            self.arriving.append(request)
        elif waits and was_back:
            self.line.insert(self._place(request), request)

    def _place(self, request: Request) -> int:
        """Of a request in the line, which is in the order of arrival; or where it is to go."""
        number = self.policy.number
        return bisect_left(self.line, number(request.request_id), key=lambda other: number(other.request_id))

    def _began(self, admitted: list[Request]) -> None:
        """Those who run now, and whose loads have begun."""
        for request in admitted:
            self.host.back(request.request_id)
            self.lane.began(request)
        if self.connector is None:
            return
        for request in self.kv_holding_waiting:
            if request.request_id in self.policy.waiting:
                self.host.back(request.request_id)
                self.lane.began(request)
                self.counters.loads += 1

    def _worth_loading(self, request: Request) -> bool:
        # Others' prefixes on the host are vLLM's own business.
        return request.status != RequestStatus.PREEMPTED or self.lane.gauge.worth_loading(request.num_tokens)

    def _unhide_sessions(self) -> None:
        """A session that waits for more input has left the running list, and holds its blocks outside."""
        for request in list(self.lane.hidden()):
            if request.status != RequestStatus.RUNNING:
                self.lane.parked.pop(request.request_id, None)
                self.lane.paused.pop(request.request_id, None)

    def _publish(self) -> None:
        self.counters.read(self.policy, self.lane)
        self.exporter.publish(self.counters)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        job = self.jobs.pop(request.request_id, None)
        if job is not None:
            job.generated = request.num_output_tokens
            self.lane.left(job, cut=request.status in CUT)
        self.host.back(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        blocks = self.view.held(request)
        self.counters.evictions += 1
        self.counters.blocks_evicted += blocks
        if self.events:
            self.events.note("eviction", request=request.request_id, blocks=blocks)
        # Before vLLM forgets the tokens that are on their way.
        self.lane.evicted(request)
        super()._preempt_request(request, *args, **kwargs)
        self.waiting.popleft()
        self.line.insert(self._place(request), request)
        self.host.left(request)
