"""First come, first served with an express lane on the simulated engine: the stock step, and the lane's decisions.

Invariant: what is decided is decided by scheduling.express, as in the server; without a decision the stock step runs on the
stock lists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from coldstart.scheduling.express.admission import Turn
from coldstart.scheduling.express.lane import Lane
from coldstart.scheduling.express.policy import Express
from coldstart.scheduling.job import Job
from coldstart.scheduling.policy import Observer
from coldstart.scheduling.profile import IterationProfile
from coldstart.scheduling.settings import ADAPTER, SchedulerSettings
from coldstart.scheduling.simulate.settings import SimSettings
from coldstart.scheduling.simulate.state import Outcome, Served, SimJob, Status, Step
from coldstart.scheduling.simulate.stock import StockScheduler


class ExpressScheduler(StockScheduler):
    """`running` is what the stock step sees; who is parked or paused is with the lane."""

    def __init__(
        self,
        machine: SimSettings,
        settings: SchedulerSettings,
        outcome: Outcome,
        profile: IterationProfile,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(machine, settings, outcome)
        self.jobs: dict[str, SimJob] = {}
        self.policy = Express(profile, settings)
        self.policy.observer = observer
        self.lane = Lane(ExpressView(self), self.policy, keeps_kv=self.keeps_kv)

    def add(self, job: SimJob, now: float) -> None:
        self.jobs[job.job.id] = job
        if ADAPTER in self.settings.classes:
            job.job.kind = job.model
        super().add(job, now)
        self.lane.arrived(job.job, now)

    def land(self, now: float) -> None:
        before = len(self.moving)
        super().land(now)
        if len(self.moving) < before:
            self.lane.rhythm.stir()

    def schedule(self, now: float) -> Step:
        turn = self.lane.decide(now)
        served, left, evicted = self._shown(turn)
        if not evicted:
            if turn is None:
                self._admit(left, served, self.holding, self.waiting, self.batch)
            else:
                self._join(left, served, turn.joining)
        self.lane.stepped({job.job.id: tokens for job, tokens in served} if self.lane.members else {})
        return self._scheduled(served)

    def evict(self, job: SimJob) -> None:
        """In the order of arrival, which a request that was ahead of its turn goes back to."""
        self._leave(job)
        number = int(job.job.id)
        later = 0
        while later < len(self.waiting) and int(self.waiting[later].job.id) < number:
            later += 1
        self.waiting.insert(later, job)
        self.lane.evicted(job)

    def hit(self, job: SimJob) -> int:
        return super().hit(job) if self.lane.gauge.worth_loading(job.known) else 0

    def finish(self, job: SimJob) -> None:
        super().finish(job)
        job.job.generated = job.delivered
        self.lane.left(job.job)
        del self.jobs[job.job.id]

    def _shown(self, turn: Turn[SimJob] | None) -> tuple[Served, int, bool]:
        if turn is not None:
            self.running = turn.running
        return self._serve_running(self.running)

    def _join(self, left: int, served: Served, joining: list[SimJob]) -> None:
        holding = deque(job for job in joining if job.status is Status.LOADING)
        waiting = deque(job for job in joining if job.status is Status.WAITING)
        most = len(self.running) + len(joining)
        self._admit(left, served, holding, waiting, most)
        for job in joining:
            if job.status is Status.RUNNING and job in self.holding:
                self.holding.remove(job)
            elif job.status is not Status.WAITING and job in self.waiting:
                self.waiting.remove(job)
            if job.status is Status.LOADING and job not in self.holding:
                self.holding.append(job)

    def _loads(self, job: SimJob, *, only: bool) -> bool | None:
        begun = super()._loads(job, only=only)
        if begun:
            self.lane.began(job)
        return begun

    def _started(self, job: SimJob, left: int) -> int:
        tokens = super()._started(job, left)
        if tokens:
            self.lane.began(job)
        return tokens

    def _unlist(self, job: SimJob) -> None:
        if job in self.running:
            self.running.remove(job)


class ExpressView:
    """A scheduling.express LaneView of the simulated engine."""

    def __init__(self, scheduler: ExpressScheduler) -> None:
        self._scheduler, self._pool = scheduler, scheduler.pool
        self.batch, self.capacity = scheduler.batch, scheduler.pool.capacity
        self.block_tokens = scheduler.machine.block_tokens

    def job(self, request: SimJob) -> Job:
        request.job.generated = request.generated
        return request.job

    def request(self, name: str) -> SimJob:
        return self._scheduler.jobs[name]

    def name(self, request: SimJob) -> str:
        return request.job.id

    def running(self) -> Sequence[SimJob]:
        return self._scheduler.running

    def outside(self) -> Iterator[SimJob]:
        # By place: whoever is evicted meanwhile came later, and goes behind.
        waiting, place = self._scheduler.waiting, 0
        while place < len(waiting):
            yield waiting[place]
            place += 1

    def landed(self) -> Iterable[SimJob]:
        return [job for job in self._scheduler.holding if job.landing_s is None and not job.stale]

    def able(self, request: SimJob) -> bool:
        if request.landing_s is not None or request.stale:
            return False
        return not self._scheduler.storing(request)

    def held(self, request: SimJob) -> int:
        return request.blocks

    def needs(self, request: SimJob) -> int:
        if request.running:
            if request.ending:
                return 0
            return max(0, -(-request.context // self.block_tokens) - request.blocks)
        return max(0, -(-request.known // self.block_tokens) - request.blocks) + 1

    def free_blocks(self) -> int:
        return self._pool.free + self._pool.leaving

    def slots(self) -> int:
        return self._scheduler.machine.slots

    def evict(self, request: SimJob) -> bool:
        if not self._scheduler.may_leave(request):
            return False
        if request in self._scheduler.running:
            self._scheduler.running.remove(request)
        self._scheduler.evict(request)
        return True
