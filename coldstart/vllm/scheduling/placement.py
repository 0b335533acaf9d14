"""Decision of one step: the order of requests, those that get memory, and the loads from host memory (FastServe, section 4.2).

Invariant: the server and the simulated engine make every decision of a step with this code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from vllm.v1.request import Request

from coldstart.scheduling.job import Job
from coldstart.scheduling.mlfq import SkipJoinMlfq, Turns
from coldstart.scheduling.reserve import ArrivalReserve
from coldstart.scheduling.settings import SchedulerSettings
from coldstart.vllm.scheduling.room import Fresh, Room
from coldstart.vllm.scheduling.view import EngineView, Enst

AHEAD = 4
"""Number of batches of ranks that are considered for loads ahead of use."""


class Loads:
    """Choice of loads; `blocked` has the requests whose rank is within the batch but whose KV is not on the device.

    Loads start in ascending ENST. A load may evict a request only if that request has a larger ENST and the loaded one ranks
    within the batch. A load never takes blocks that the picked requests need. It takes blocks reserved for arrivals only if its
    request ranks within the batch. `loading` has those of `blocked` whose load is under way or starts now. The others wait for
    free blocks, and requests with a smaller ENST get blocks first.
    """

    def __init__(self, room: Room, ranking: Iterable[Job], reserve: ArrivalReserve, *, ahead: bool) -> None:
        self.room, self.view, self.ranking = room, room.view, ranking
        self.reserve, self.ahead = reserve, ahead
        self.blocked: list[str] = []
        self.loading: list[str] = []

    def choose(self, chosen: list[Request], enst: Enst, now: float) -> list[Request]:
        """Return the requests whose load starts now; evict others for requests that rank within the batch."""
        self.blocked, self.loading = [], []
        if not self.view.has_evicted():
            return []
        due, others = self._hosted()
        fitting = self._fitting(chosen, due, others, enst, self.reserve.blocks(now))
        self.loading += [request.request_id for request in fitting if request in due]
        return fitting

    def _fitting(
        self, chosen: list[Request], due: list[Request], others: list[Request], enst: Enst, reserve: int
    ) -> list[Request]:
        """Return the requests that fit, in ascending ENST; stop at the first within the batch that does not fit."""
        room, fresh = self.room, self.room.fresh
        earned, fitting = set(due), list[Request]()
        # The engine starts a load only if the prefills under way still get the blocks that they need.
        taken, pledged = self.view.reserved(), room.pledged
        for request in sorted([*due, *others], key=enst):
            need = room.needs(request)
            if request in earned:
                self._make_way(request, need + taken, [*chosen, *fitting], enst)
            spare = room.free - taken - (0 if request in earned else reserve)
            if need > spare or not fresh.admits(request, pledged):
                if request in earned:
                    break
                continue
            taken += need
            pledged += fresh.pledge(request)
            fitting.append(request)
        return fitting

    def _make_way(self, request: Request, need: int, kept: list[Request], enst: Enst) -> None:
        """Evict requests with a larger ENST, the largest first, if this frees enough blocks."""
        room = self.room
        if room.free >= need:
            return
        limit = enst(request)
        later = [victim for victim in reversed(room.list_victims(kept, enst)) if enst(victim) > limit]
        for victim in room.choose_victims(later, need - room.free, 0):
            room.evict(victim)

    def _hosted(self) -> tuple[list[Request], list[Request]]:
        """Return the requests on the host: those within the first B ranks, and those of a limited look-ahead."""
        view, batch = self.view, self.view.batch
        due: list[Request] = []
        others: list[Request] = []
        ranks = islice(view.servable(self.ranking), AHEAD * batch if self.ahead else batch)
        for position, job in enumerate(ranks):
            earned = position < batch
            request = view.find_on_host(job.id)
            if request is not None:
                (due if earned else others).append(request)
            elif earned and view.is_loading(job.id):
                self.blocked.append(job.id)
        self.loading = list(self.blocked)
        self.blocked += [request.request_id for request in due]
        return due, others


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

    def decide(self, now: float) -> tuple[list[Request], list[Request]]:
        """Return the requests that run now, in rank order, and those whose load starts; evict those that do not fit."""
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
        return chosen, loads

    def pick(self) -> list[Job]:
        """Return the jobs that this step should serve."""
        # `jobs` is in order of arrival, so no live request is sorted here.
        order: Iterable[Job] = self.jobs.values() if self.turns.use_arrival_order() else self.ranking
        return list(islice(filter(self.view.ready, order), self.view.batch))

    def _passed_over(self, picked: list[Request]) -> bool:
        """Return whether a request was skipped because it was not ready; no event reports when it becomes ready."""
        if len(picked) < min(self.view.batch, len(self.jobs)):
            return True
        return not all(
            request.request_id == first.id for request, first in zip(picked, self.ranking, strict=False)
        )

    def enst(self, now: float) -> Enst:
        """Return the policy's ENST function, evaluated at its first call: most steps evict no request."""
        found: Callable[[Job], float] | None = None

        def enst(request: Request) -> float:
            nonlocal found
            if found is None:
                found = self.ranking.enst(now, self.view.batch)
            return found(self.jobs[request.request_id])

        return enst
