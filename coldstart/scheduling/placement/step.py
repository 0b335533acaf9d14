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

    def arrived(self, job: Job, blocks: int, now: float) -> None:
        """A new request, which asks for so many blocks."""
        self.jobs[job.id] = job
        self.ranking.add(job, now)
        self.reserve.arrived(blocks, now)

    def left(self, name: str) -> None:
        """The request is gone."""
        job = self.jobs.pop(name, None)
        if job is not None:
            self.ranking.remove(job)
        self.fresh.discard(name)

    def decide(self, now: float) -> Decision[R]:
        """Evicts whom the decision leaves no room for."""
        self.ranking.tick(now, self.view.batch)
        picked = [self.view.request(job.id) for job in self.pick()]
        enst = self.enst(now)
        chosen = self.room.make(picked, enst)
        loads = self.loads.choose(chosen, enst, now) if self.keeps_kv else []
        return Decision(chosen, loads)

    def pick(self) -> list[Job]:
        """Whom this step should serve."""
        # The table has them in order of arrival: no turn sorts every live request.
        order: Iterable[Job] = self.jobs.values() if self.turns.oldest() else self.ranking
        return pick(order, self.view.batch, self.view.ready)

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
