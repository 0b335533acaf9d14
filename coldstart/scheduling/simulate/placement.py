"""Fit the picked jobs into device memory, by strategy.

Invariants: the returned jobs hold every block their next iteration needs; a job that has produced no token
since it came back is a victim of the top job only; nobody is evicted for a job of lower rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coldstart.scheduling.job import Job
from coldstart.scheduling.reserve import ArrivalReserve
from coldstart.scheduling.simulate.memory import Memory
from coldstart.scheduling.simulate.settings import SimSettings
from coldstart.scheduling.simulate.state import Kv, SimJob
from coldstart.scheduling.swap import plan

Enst = Callable[[Job], float]


@dataclass(slots=True)
class Placement:
    """One step's jobs that can run, and the seconds the step must wait for copies first."""

    runnable: list[SimJob]
    wait_s: float = 0.0


class Placer:
    def __init__(self, settings: SimSettings, memory: Memory, jobs: dict[str, SimJob]) -> None:
        self.settings, self.memory, self.jobs = settings, memory, jobs
        self.reserve = ArrivalReserve(max(1e-3, self._load_s()), settings.reserve_quantile)

    def ready(self, job: Job) -> bool:
        """Reactive loads on demand, so a job on the host is ready; proactive waits until it is back."""
        kv = self.jobs[job.id].kv
        return kv in (Kv.NONE, Kv.DEVICE) or (kv is Kv.HOST and self.settings.strategy == "reactive")

    def arrived(self, job: SimJob, now: float) -> None:
        self.reserve.arrived(self.settings.blocks(job.job.prompt_tokens + 1), now)

    def place(self, picked: list[SimJob], top: set[str], enst: Callable[[], Enst], now: float) -> Placement:
        """`top` names the jobs whose rank earns a slot now, ready or not."""
        if self.settings.device_blocks is None:
            return Placement(picked)
        if self.settings.strategy == "proactive":
            self._swap_ahead(picked, top, enst, now)
        placement = self._fit(picked, enst, now)
        if not placement.runnable and not self.memory.in_flight:
            self._force(top, enst(), now)
        return placement

    def _swap_ahead(self, picked: list[SimJob], top: set[str], enst: Callable[[], Enst], now: float) -> None:
        memory, chosen = self.memory, {job.job.id for job in picked}
        urgent = sum(self._missing(job) for job in picked)
        reserve = self.reserve.blocks(now)
        free = int(memory.free) + memory.leaving
        if free >= urgent + reserve and not memory.hosted:
            return
        hosted = [job.job for job in memory.hosted.values()]
        swaps = plan(
            [job.job for job in self._evictable(chosen)],
            [job for job in hosted if job.id in top],
            [job for job in hosted if job.id not in top],
            enst=enst(),
            blocks=lambda job: self.jobs[job.id].blocks,
            free=free,
            reserve=reserve,
            urgent=urgent,
        )
        for out in swaps.out:
            memory.move_out(self.jobs[out.id], now)
        for into in swaps.into:
            if self.jobs[into.id].blocks + urgent > memory.free:
                break
            memory.move_in(self.jobs[into.id], now)

    def _fit(self, picked: list[SimJob], enst: Callable[[], Enst], now: float) -> Placement:
        """Give blocks in rank order; victims from outside the batch go first, then the batch's tail."""
        placement, admitting = Placement([]), True
        queue = list(picked)
        while queue:
            job = queue.pop(0)
            if job.kv in (Kv.LEAVING, Kv.LOADING) or (job.kv is Kv.NONE and not admitting):
                continue
            need = self._missing(job) + (job.blocks if job.kv is Kv.HOST else 0)
            placement.wait_s += self._make_room(
                job, need, queue, placement.runnable, enst, now + placement.wait_s
            )
            if need > self.memory.free:
                # As in vLLM: an admission that does not fit ends the admissions of this step.
                admitting = admitting and job.kv is not Kv.NONE
                continue
            if job.kv is Kv.HOST:
                self.memory.move_in(job, now + placement.wait_s)
                placement.wait_s += self.memory.wait_for([job], now + placement.wait_s)
            self.memory.grow(job, job.job.context + 1)
            placement.runnable.append(job)
        return placement

    def _make_room(
        self,
        job: SimJob,
        need: int,
        later: list[SimJob],
        kept: list[SimJob],
        enst: Callable[[], Enst],
        now: float,
    ) -> float:
        if need <= self.memory.free or (self.settings.strategy == "proactive" and self.memory.leaving):
            return 0.0
        chosen = {other.job.id for other in (job, *later, *kept)}
        order = enst()
        anybody = not kept  # the top job must run, or two jobs without progress could block it for ever
        victims = sorted(self._evictable(chosen, anybody), key=lambda v: order(v.job), reverse=True)
        victims += [v for v in reversed(later) if v.kv is Kv.DEVICE and v.blocks and self._yields(v, job)]
        waited = 0.0
        for victim in victims:
            if need <= self.memory.free:
                break
            waited += self._evict(victim, now + waited)
        return waited

    def _yields(self, victim: SimJob, job: SimJob) -> bool:
        """Within one batch a resident job gives way to another's growth, but not to one that has to come in
        from the same level: equals that take turns would move their KV at every turn.
        """
        return job.kv is Kv.DEVICE or victim.job.level > job.job.level

    def _force(self, top: set[str], enst: Enst, now: float) -> None:
        """Nothing runs and nothing moves: bring the soonest job back, whatever the reserve says."""
        hosted = sorted(self.memory.hosted.values(), key=lambda job: (job.job.id not in top, enst(job.job)))
        if not hosted:
            return
        resident = sorted(self._evictable(set(), anybody=True), key=lambda job: -enst(job.job))
        while resident and hosted[0].blocks > self.memory.free + self.memory.leaving:
            self.memory.move_out(resident.pop(0), now)
        if hosted[0].blocks <= self.memory.free:
            self.memory.move_in(hosted[0], now)

    def _evict(self, victim: SimJob, now: float) -> float:
        if self.settings.strategy == "recompute":
            self.memory.discard(victim)
            return 0.0
        self.memory.move_out(victim, now)
        if victim.kv is Kv.LEAVING and self.settings.strategy == "reactive":
            return self.memory.wait_for([victim], now)
        return 0.0

    def _evictable(self, chosen: set[str], anybody: bool = False) -> list[SimJob]:
        resident = (job for job in self.jobs.values() if job.kv is Kv.DEVICE and job.blocks)
        return [job for job in resident if job.job.id not in chosen and (job.progressed or anybody)]

    def _missing(self, job: SimJob) -> int:
        return self.memory.missing(job, job.job.context + 1)

    def _load_s(self) -> float:
        """One load's latency for a typical context of 512 tokens, the window of the arrivals' reserve."""
        return self.settings.blocks(512) * self.settings.block_bytes / self.settings.link_bytes_s
