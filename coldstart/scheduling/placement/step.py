"""One step's decision: the ranking, whom memory holds of it, and which loads start.

Invariant: everything that the server and the simulated engine decide about a step is decided here, by the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic

from coldstart.scheduling.job import Job
from coldstart.scheduling.placement.fresh import Fresh
from coldstart.scheduling.placement.loads import Loads
from coldstart.scheduling.placement.room import Room
from coldstart.scheduling.placement.view import Enst, KvView, R
from coldstart.scheduling.policy import Policy, Turns, pick
from coldstart.scheduling.reserve import ArrivalReserve
from coldstart.scheduling.settings import SchedulerSettings


@dataclass(frozen=True, slots=True)
class Decision(Generic[R]):
    """`chosen` run now, in rank order; `loads` start; victims have left already."""

    chosen: list[R]
    loads: list[R]


class Placement(Generic[R]):
    """`jobs` are the live ones in order of arrival, `keeps_kv` says that the host keeps KV of who is evicted."""

    def __init__(
        self,
        view: KvView[R],
        ranking: Policy,
        jobs: dict[str, Job],
        settings: SchedulerSettings,
        *,
        keeps_kv: bool,
    ) -> None:
        self.view, self.ranking, self.jobs, self.keeps_kv = view, ranking, jobs, keeps_kv
        self.fresh = Fresh(view)
        self.room = Room(view, self.fresh)
        self.reserve = ArrivalReserve(settings.load_latency_s, settings.reserve_quantile)
        ahead = settings.kv_strategy == "proactive"
        self.loads = Loads(self.room, ranking, self.reserve, ahead=ahead)
        self.turns = Turns(settings.oldest_share)
        self._stirred, self._moved, self._running = True, 0, 0

    def arrived(self, job: Job, blocks: int, now: float) -> None:
        """A new request, which asks for so many blocks."""
        self.jobs[job.id] = job
        self.ranking.add(job, now)
        self.reserve.arrived(blocks, now)
        self._stirred = True

    def left(self, name: str) -> None:
        """The request is gone."""
        job = self.jobs.pop(name, None)
        if job is not None:
            self.ranking.remove(job)
        self.fresh.discard(name)
        self._stirred = True

    def stir(self) -> None:
        """Something has happened besides: decide anew."""
        self._stirred = True

    def stands(self, now: float) -> bool:
        """Whether the latest decision would be taken again: since then nobody came, left, landed, or used up a quantum, and
        everybody chosen has room for a token more. Asked once a step, by an engine that tells of what happens.
        """
        if self._stirred:
            return False
        self.ranking.tick(now, self.view.batch)
        return self.ranking.moved == self._moved and self.room.goes_on(self._running)

    def decide(self, now: float) -> Decision[R]:
        """Evicts whom the decision leaves no room for."""
        self.ranking.tick(now, self.view.batch)
        picked = [self.view.request(job.id) for job in self.pick()]
        enst = self.enst(now)
        chosen = self.room.make(picked, enst)
        loads = self.loads.choose(chosen, enst, now) if self.keeps_kv else []
        self._moved, self._running = self.ranking.moved, len(chosen)
        self._stirred = (
            not self.room.steady or bool(self.fresh) or self.turns.share > 0 or self._passed_over(picked)
        )
        self._stirred |= self.keeps_kv and self.view.any_away()
        return Decision(chosen, loads)

    def pick(self) -> list[Job]:
        """Whom this step should serve."""
        # The table has them in order of arrival: no turn sorts every live request.
        order: Iterable[Job] = self.jobs.values() if self.turns.oldest() else self.ranking
        return pick(order, self.view.batch, self.view.ready)

    def _passed_over(self, picked: list[R]) -> bool:
        """Whether somebody of the order was not ready, which ends without a word."""
        if len(picked) < min(self.view.batch, len(self.jobs)):
            return True
        job = self.view.job
        return not all(job(request) is first for request, first in zip(picked, self.ranking, strict=False))

    def enst(self, now: float) -> Enst[R]:
        """The policy's ENST of a request, worked out when first asked for: most steps evict nobody."""
        found: Callable[[Job], float] | None = None
        job = self.view.job

        def enst(request: R) -> float:
            nonlocal found
            if found is None:
                found = self.ranking.enst(now, self.view.batch)
            return found(job(request))

        return enst
