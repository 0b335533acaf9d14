"""Decision of one step: the order of requests, those that get memory, and the loads that start.

Invariant: the server and the simulated engine make every decision of a step with this code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from vllm.v1.request import Request

from coldstart.scheduling.job import Job
from coldstart.scheduling.mlfq import SkipJoinMlfq, Turns
from coldstart.scheduling.reserve import ArrivalReserve
from coldstart.scheduling.settings import SchedulerSettings
from coldstart.vllm.scheduling.fresh import Fresh
from coldstart.vllm.scheduling.loads import Loads
from coldstart.vllm.scheduling.room import Room
from coldstart.vllm.scheduling.view import EngineView, Enst


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision of one step: `chosen` run now, in rank order, and `loads` start. Victims are already evicted."""

    chosen: list[Request]
    loads: list[Request]


class Placement:
    """Decisions of one engine.

    `jobs` are the live jobs in order of arrival, and `keeps_kv` is whether the host stores the KV of evicted
    requests.
    """

    def __init__(
        self,
        view: EngineView,
        ranking: SkipJoinMlfq,
        jobs: dict[str, Job],
        settings: SchedulerSettings,
        *,
        keeps_kv: bool,
    ) -> None:
        self.view, self.ranking, self.jobs, self.keeps_kv = view, ranking, jobs, keeps_kv
        self.fresh = Fresh(view)
        self.room = Room(view, self.fresh)
        self.reserve = ArrivalReserve(settings.reserve_quantile)
        self.ahead = keeps_kv and settings.kv_strategy == "proactive"
        self.loads = Loads(self.room, ranking, self.reserve, ahead=self.ahead)
        self.turns = Turns(settings.oldest_share)
        self._stirred, self._moved, self._running = True, 0, 0

    def add(self, job: Job, blocks: int, now: float) -> None:
        """Add a new request, which needs `blocks` KV blocks."""
        self.jobs[job.id] = job
        self.ranking.add(job, now)
        self.reserve.add_arrival(blocks, now)
        self._stirred = True

    def remove(self, name: str) -> None:
        """Remove a request that has ended."""
        job = self.jobs.pop(name, None)
        if job is not None:
            self.ranking.remove(job)
        self.fresh.discard(name)
        self._stirred = True

    def invalidate(self) -> None:
        """Invalidate the latest decision after any other event."""
        self._stirred = True

    def is_current(self, now: float) -> bool:
        """Return whether the latest decision is still valid; an engine that reports its events calls this once per step.

        It is valid if no request arrived, ended, finished a load or used up a quantum, and each chosen
        request has blocks for one more token.
        """
        if self._stirred:
            return False
        self.ranking.tick(now, self.view.batch)
        return self.ranking.moved == self._moved and self.room.fits_next_tokens(self._running)

    def decide(self, now: float) -> Decision:
        """Return the decision of this step, and evict the requests that do not fit."""
        self.ranking.tick(now, self.view.batch)
        picked = [self.view.request(job.id) for job in self.pick()]
        enst = self.enst(now)
        if self.ahead:
            self.room.reserve, self.room.horizon_s = self.reserve.blocks(now), self.reserve.window_s
        chosen = self.room.make(picked, enst)
        loads = self.loads.choose(chosen, enst, now) if self.keeps_kv else []
        self._moved, self._running = self.ranking.moved, len(chosen)
        self._stirred = (
            not self.room.steady or bool(self.fresh) or self.turns.share > 0 or self._passed_over(picked)
        )
        self._stirred |= self.keeps_kv and self.view.has_evicted()
        return Decision(chosen, loads)

    def pick(self) -> list[Job]:
        """Return the jobs that this step should serve."""
        # `jobs` is in order of arrival, so no live request is sorted here.
        order: Iterable[Job] = self.jobs.values() if self.turns.use_arrival_order() else self.ranking
        return list(islice(filter(self.view.ready, order), self.view.batch))

    def _passed_over(self, picked: list[Request]) -> bool:
        """Return whether a request was skipped because it was not ready; no event reports when it becomes ready."""
        if len(picked) < min(self.view.batch, len(self.jobs)):
            return True
        job = self.view.job
        return not all(job(request) is first for request, first in zip(picked, self.ranking, strict=False))

    def enst(self, now: float) -> Enst:
        """Return the policy's ENST function, evaluated at its first call: most steps evict no request."""
        found: Callable[[Job], float] | None = None
        job = self.view.job

        def enst(request: Request) -> float:
            nonlocal found
            if found is None:
                found = self.ranking.enst(now, self.view.batch)
            return found(job(request))

        return enst
