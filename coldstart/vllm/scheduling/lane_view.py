"""vLLM's scheduler as the express lane sees it.

Invariant: every answer is vLLM's own, read when it is asked for; requests that the lane hides are the end of vLLM's
running list between two steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from vllm.v1.request import Request

from coldstart.scheduling.job import Job
from coldstart.vllm.scheduling.flight import to_come
from coldstart.vllm.scheduling.states import State, all_in_flight
from coldstart.vllm.scheduling.view import PREEMPTED, RUNNING, PoolView

if TYPE_CHECKING:
    from coldstart.vllm.scheduling.lane import LaneScheduler

STARTABLE = (State.NEW, State.HOST, State.LOADED)


class RequestsView(PoolView):
    """A scheduling.express LaneView of one vLLM scheduler."""

    name = staticmethod(attrgetter("request_id"))

    def __init__(self, scheduler: LaneScheduler) -> None:
        super().__init__(scheduler, scheduler.batch)
        self._scheduler = scheduler

    def job(self, request: Request) -> Job:
        job = self._scheduler.jobs[request.request_id]
        job.generated = to_come(request) - request.num_prompt_tokens
        return job

    def request(self, name: str) -> Request:
        return self._scheduler.requests[name]

    def running(self) -> Sequence[Request]:
        hidden = self._scheduler.hidden
        running: list[Request] = self._scheduler.running
        return running[: len(running) - hidden] if hidden else running

    def outside(self) -> Iterator[Request]:
        # By place: whoever is evicted meanwhile came later, and goes behind.
        line, place = self._scheduler.line, 0
        while place < len(line):
            yield line[place]
            place += 1

    def landed(self) -> Iterable[Request]:
        scheduler = self._scheduler
        return [request for request in scheduler.arriving if scheduler.state(request) in STARTABLE]

    def able(self, request: Request) -> bool:
        scheduler = self._scheduler
        if scheduler.state(request) not in STARTABLE:
            return False
        # None: copies of its blocks to the host are under way.
        return request.status != PREEMPTED or scheduler.host.hit(request) is not None

    def needs(self, request: Request) -> int:
        if request.status != RUNNING:
            return self.to_start(request)
        return 0 if all_in_flight(request) else self.to_go_on(request)

    def slots(self) -> int:
        scheduler = self._scheduler
        slots: int = scheduler.max_num_running_reqs - scheduler.num_waiting_for_streaming_input
        return slots

    def evict(self, request: Request) -> bool:
        scheduler = self._scheduler
        if scheduler.in_flight(request) or not scheduler._request_blocks_can_be_freed(request):
            return False
        scheduler.running.remove(request)
        scheduler._preempt_request(
            request, scheduler.clock(), drop_stale_output=scheduler.requires_kv_delivery
        )
        return True
