"""The server's scheduler on the simulated engine: policy and placement decide, the stock step executes.

Invariant: what is decided is decided by scheduling.placement, as in the server; here is only the view of the memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from coldstart.lab.scheduling.settings import SimSettings
from coldstart.lab.scheduling.state import Outcome, Served, SimJob, Status, Step
from coldstart.lab.scheduling.stock import StockScheduler
from coldstart.scheduling.job import Job
from coldstart.scheduling.placement import Placement
from coldstart.scheduling.profile import IterationProfile
from coldstart.scheduling.registry import make_policy
from coldstart.scheduling.settings import SchedulerSettings


class PlacedScheduler(StockScheduler):
    """Jobs that hold a slot: `running` were shown to the stock step, `parked` were not, in the order of parking."""

    def __init__(
        self,
        machine: SimSettings,
        settings: SchedulerSettings,
        outcome: Outcome,
        profile: IterationProfile,
    ) -> None:
        super().__init__(machine, settings, outcome)
        self.profile = profile
        self.ranking = make_policy(settings.policy, profile, settings)
        self.jobs: dict[str, SimJob] = {}
        self.parked: dict[SimJob, None] = {}
        self._last_s: float | None = None
        self.placement = Placement(SimView(self), self.ranking, {}, settings, keeps_kv=self.keeps_kv)

    def add(self, job: SimJob, now: float) -> None:
        if not self.jobs:
            self._last_s = None
        self.jobs[job.job.id] = job
        self.placement.arrived(job.job, self.machine.blocks(job.job.prompt_tokens), now)

    def schedule(self, now: float) -> Step:
        self.placement.turns.passed(0.0 if self._last_s is None else now - self._last_s)
        self._last_s = now
        decision = self.placement.decide(now)
        self._arrange([job for job in decision.chosen if job.running])
        served, left, evicted = self._serve_running(self.running)
        before = len(self.running)
        if not evicted:
            self._join(left, served, decision.chosen, decision.loads)
        self._book(served, self.running[before:], now)
        return self._scheduled(served)

    def blocked(self) -> list[SimJob]:
        return [self.jobs[name] for name in self.placement.loads.blocked if name in self.jobs]

    def evict(self, job: SimJob) -> None:
        self._unlist(job)
        self.placement.fresh.discard(job.job.id)
        job.job.computed = 0
        self._leave(job)

    def _join(self, left: int, served: Served, chosen: list[SimJob], loads: list[SimJob]) -> None:
        joining = [job for job in chosen if not job.running]
        holding = deque(job for job in joining if job.status is Status.LOADING)
        waiting = deque([*(job for job in joining if job.status is Status.WAITING), *loads])
        most = len(self.running) + len(joining) + bool(loads)
        self._admit(left, served, holding, waiting, most, set(loads))
        for job in (*joining, *loads):
            if job.loading:
                self.placement.fresh.add(job)

    def _book(self, served: Served, admitted: Iterable[SimJob], now: float) -> None:
        for new in admitted:
            self.placement.fresh.add(new)
        decode_s = self.profile.decode(len(served))
        for sim, tokens in served:
            job = sim.job
            cost = self.profile.prefill(tokens) if tokens > 1 or job.generated == 0 else decode_s
            done = tokens == sim.pending
            job.generated = sim.generated + done
            job.computed = sim.computed + tokens
            if done:
                self.placement.fresh.discard(job.id)
            self.ranking.served(job, cost, now)

    def finish(self, job: SimJob) -> None:
        super().finish(job)
        del self.jobs[job.job.id]
        self.placement.left(job.job.id)

    def _arrange(self, shown: list[SimJob]) -> None:
        """Park the running jobs that were not chosen."""
        kept = set(shown)
        self.parked.update((job, None) for job in self.running if job not in kept)
        for job in shown:
            self.parked.pop(job, None)
        self.running = shown

    def _unlist(self, job: SimJob) -> None:
        if job in self.parked:
            del self.parked[job]
        elif job in self.running:
            self.running.remove(job)

    def _unqueue(self, job: SimJob) -> None:
        return None


class SimView:
    """A placement.KvView of the simulated engine."""

    watermark, groups, speculates = 0, 1, False

    def __init__(self, scheduler: PlacedScheduler) -> None:
        self._scheduler, self._pool, self._machine = scheduler, scheduler.pool, scheduler.machine
        self.batch = scheduler.batch
        self.token_budget = scheduler.machine.token_budget
        self.capacity = scheduler.pool.capacity
        self._block = scheduler.machine.block_tokens
        self._waits_for_loads = scheduler.machine.copies != "blocking"

    def request(self, name: str) -> SimJob:
        return self._scheduler.jobs[name]

    def name(self, request: SimJob) -> str:
        return request.job.id

    def job(self, request: SimJob) -> Job:
        return request.job

    def ready(self, job: Job) -> bool:
        request = self._scheduler.jobs[job.id]
        if request.running:
            return not request.ending
        if request.landing_s is not None or request.stale or self._scheduler.storing(request):
            return False
        away = request.evictions and request.status is Status.WAITING
        return not (away and self._waits_for_loads and self._scheduler.known_hit(request))

    def started(self) -> Iterable[SimJob]:
        return [*self._scheduler.running, *self._scheduler.parked]

    def runs(self, request: SimJob) -> bool:
        return request.running

    def proceeds(self, request: SimJob) -> bool:
        return request.running and not request.ending

    def in_flight(self, name: str) -> bool:
        return False  # one stage: the simulated engine has no pipeline

    def prefilling(self, requests: Sequence[SimJob]) -> list[SimJob]:
        prefills = self._scheduler.prefills
        return [request for request in requests if not request.running or request in prefills]

    def loading(self, name: str) -> bool:
        return self._scheduler.jobs[name].landing_s is not None

    def landed(self, request: SimJob) -> bool:
        return request.status is Status.LOADING and request.landing_s is None

    def leavable(self) -> Iterable[SimJob]:
        if not self._scheduler.keeps_kv:
            return self.started()
        processed = self._scheduler.processed
        return [request for request in self.started() if request.scheduled_step <= processed]

    def free_blocks(self) -> int:
        return self._pool.free + self._pool.leaving

    def free_slots(self) -> int:
        return self._machine.slots - len(self._scheduler.running) - len(self._scheduler.parked)

    def reserved(self) -> int:
        return self._scheduler.reserved()

    def needs(self, request: SimJob) -> int:
        if request.running:
            return max(0, -(-request.context // self._block) - request.blocks)
        needed = max(0, -(-request.known // self._block) - request.blocks) + 1
        # Where a copy holds up the step, who joins may be loaded, and a load leaves alone what prefills still need.
        loads = not self._waits_for_loads and request.evictions and self._scheduler.known_hit(request)
        return needed + self._scheduler.reserved() if loads else needed

    def bound(self, request: SimJob) -> int:
        return request.known // self._block + 2

    def pending(self, request: SimJob) -> int:
        # What it left in the prefix cache is not computed again.
        return request.pending - (0 if request.computed else request.cached * self._block)

    def freed(self, order: Sequence[SimJob]) -> Iterator[int]:
        return (request.blocks for request in order)

    def evict(self, request: SimJob) -> None:
        self._scheduler.evict(request)

    def any_away(self) -> bool:
        return bool(self._scheduler.host.away) or bool(self._scheduler.moving)

    def on_host(self, name: str) -> SimJob | None:
        request = self._scheduler.jobs[name]
        if request.status is not Status.WAITING or not request.evictions:
            return None
        if request.landing_s is not None or request.stale or not self._waits_for_loads:
            return None
        if self._scheduler.storing(request):
            return None
        return request if self._scheduler.known_hit(request) else None
