"""Decide in each step which requests run, which get memory, and whose KV is loaded from the host (FastServe, section 4.2).

Invariant: the server and the simulated engine use the same code.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import islice

from vllm.v1.request import Request

from coldstart.scheduling.job import Job
from coldstart.scheduling.mlfq import OrderAlternation, SkipJoinMlfq
from coldstart.scheduling.reserve import ArrivalReserve
from coldstart.scheduling.settings import SchedulerSettings
from coldstart.vllm.scheduling.room import KvAllocator, ProtectedRequests
from coldstart.vllm.scheduling.view import EngineView, Enst

LOOKAHEAD_BATCHES = 4
"""Number of jobs that are considered for proactive loads, in multiples of the batch size."""


class LoadSelector:
    """Selector of the requests whose KV is loaded from the host.

    Loads start in ascending ENST (estimated next scheduled time). A load may evict a request with a larger ENST, or use
    blocks reserved for arrivals, only if its own request ranks within the batch. A load never uses blocks that picked
    requests need.
    """

    def __init__(
        self, room: KvAllocator, ranking: Iterable[Job], reserve: ArrivalReserve, *, ahead: bool
    ) -> None:
        self.room, self.view, self.ranking = room, room.view, ranking
        self.reserve, self.ahead = reserve, ahead

    def choose(self, chosen: list[Request], enst: Enst, now: float) -> list[Request]:
        """Return the requests to load now, in ascending ENST, up to the first that ranks within the batch and does not fit.

        A load evicts other requests only if its own request ranks within the batch.
        """
        if not self.view.has_evicted_requests():
            return []
        due, others = self._list_on_host()
        reserve = self.reserve.compute_reserved_blocks(now)
        room, fresh = self.room, self.room.fresh
        in_batch, fitting = set(due), list[Request]()
        # The engine starts a load only if running prefills still get the blocks that they need.
        used, pledged_blocks = self.view.count_reserved_blocks(), room.pledged
        for request in sorted([*due, *others], key=enst):
            need = room.needs(request)
            if request in in_batch:
                self._evict_for(request, need + used, [*chosen, *fitting], enst)
            available = room.free_blocks - used - (0 if request in in_batch else reserve)
            if need > available or not fresh.can_protect(request, pledged_blocks):
                if request in in_batch:
                    break
                continue
            used += need
            pledged_blocks += fresh.pledge(request)
            fitting.append(request)
        return fitting

    def _evict_for(self, request: Request, need: int, protected: list[Request], enst: Enst) -> None:
        """Evict requests with a larger ENST, starting with the largest, if this frees enough blocks."""
        room = self.room
        if room.free_blocks >= need:
            return
        limit = enst(request)
        later = [victim for victim in reversed(room.list_victims(protected, enst)) if enst(victim) > limit]
        for victim in room.choose_victims(later, need - room.free_blocks, 0):
            room.evict(victim)

    def _list_on_host(self) -> tuple[list[Request], list[Request]]:
        """Return the requests whose KV is on the host: those within the batch, and others within the look-ahead."""
        view, batch = self.view, self.view.batch
        due: list[Request] = []
        others: list[Request] = []
        ranks = islice(
            view.list_not_in_flight(self.ranking), LOOKAHEAD_BATCHES * batch if self.ahead else batch
        )
        for position, job in enumerate(ranks):
            if (request := view.find_request_on_host(job.id)) is not None:
                (due if position < batch else others).append(request)
        return due, others


class Placement:
    """Scheduling decisions for one engine.

    `jobs` are the unfinished jobs in order of arrival. If `keeps_kv` is True, the host stores the KV of evicted requests.
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
        self.fresh = ProtectedRequests(view)
        self.room = KvAllocator(view, self.fresh)
        self.reserve = ArrivalReserve(settings.reserve_quantile)
        self.ahead = keeps_kv and settings.kv_strategy == "proactive"
        self.loads = LoadSelector(self.room, ranking, self.reserve, ahead=self.ahead)
        self.turns = OrderAlternation(settings.oldest_share)
        self._is_invalid, self._decided_moves, self._running_count = True, 0, 0

    def add(self, job: Job, blocks: int, now: float) -> None:
        """Add a new request that needs `blocks` KV blocks."""
        self.jobs[job.id] = job
        self.ranking.add(job, now)
        self.reserve.add_arrival(blocks, now)
        self._is_invalid = True

    def remove(self, name: str) -> None:
        """Remove a request that has ended."""
        job = self.jobs.pop(name, None)
        if job is not None:
            self.ranking.remove(job)
        self.fresh.discard(name)
        self._is_invalid = True

    def invalidate(self) -> None:
        """Invalidate the latest decision."""
        self._is_invalid = True

    def is_current(self, now: float) -> bool:
        """Return whether the latest decision is still valid. Call this once in each step.

        A decision is valid if no request has since arrived, ended, finished a load or used its quantum, and each running
        request has blocks for another token.
        """
        if self._is_invalid:
            return False
        self.ranking.promote_starved_jobs(now, self.view.batch)
        return self.ranking.moved == self._decided_moves and self.room.fits_next_tokens(self._running_count)

    def decide(self, now: float) -> tuple[list[Request], list[Request]]:
        """Return the requests to run, in rank order, and the requests to load. Evict requests that do not fit."""
        self.ranking.promote_starved_jobs(now, self.view.batch)
        picked = self.pick()
        enst = self.enst(now)
        if self.ahead:
            self.room.reserve = self.reserve.compute_reserved_blocks(now)
            self.room.horizon_s = self.reserve.window_s
        chosen = self.room.allocate(picked, enst)
        loads = self.loads.choose(chosen, enst, now) if self.keeps_kv else []
        self._decided_moves, self._running_count = self.ranking.moved, len(chosen)
        self._is_invalid = (
            not self.room.steady or bool(self.fresh) or self.turns.share > 0 or self._skips_unready(picked)
        )
        self._is_invalid |= self.keeps_kv and self.view.has_evicted_requests()
        return chosen, loads

    def pick(self) -> list[Request]:
        """Return the highest-ranked requests that are ready, at most one batch."""
        # `jobs` is in order of arrival, so it need not be sorted.
        order: Iterable[Job] = self.jobs.values() if self.turns.choose_arrival_order() else self.ranking
        ready = (self.view.request(job.id) for job in order if self.view.is_ready(job))
        return list(islice(self.view.limit_adapters(ready), self.view.batch))

    def _skips_unready(self, picked: list[Request]) -> bool:
        """Return whether `picked` omits a request that is not ready. No event announces when such a request becomes ready."""
        if len(picked) < min(self.view.batch, len(self.jobs)):
            return True
        return not all(
            request.request_id == first.id for request, first in zip(picked, self.ranking, strict=False)
        )

    def enst(self, now: float) -> Enst:
        """Return a function that computes a request's ENST (estimated next scheduled time) on demand."""
        compute = cache(lambda: self.ranking.enst(now, self.view.batch))
        return lambda request: compute()(self.jobs[request.request_id])
