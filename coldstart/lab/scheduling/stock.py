"""Model of vLLM's schedule(): first the running jobs in order, with the last one as victim; then waiting jobs while they fit.

Invariants: no job overtakes an evicted one; an iteration that evicts admits no job; a job is admitted only if all its
tokens fit; an iteration has at most `token_budget` tokens; a victim computes those of its blocks again that are neither in
the prefix cache nor in host memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection

from coldstart.lab.scheduling.host import Host
from coldstart.lab.scheduling.pool import Pool
from coldstart.lab.scheduling.settings import SimSettings
from coldstart.lab.scheduling.state import Outcome, Served, SimJob, Status, Step
from coldstart.scheduling.settings import SchedulerSettings


class StockScheduler:
    """First-come-first-served scheduler.

    `wait_s` is the delay of the next iteration by blocking copies, in seconds. `start_s` is the time at which its other copies
    start.
    """

    def __init__(self, machine: SimSettings, settings: SchedulerSettings, outcome: Outcome) -> None:
        self.machine, self.settings, self.outcome = machine, settings, outcome
        self.batch = min(settings.batch or machine.slots, machine.slots)
        self.pool = Pool(machine.device_blocks, machine.block_tokens)
        self.host = Host(machine, outcome)
        self.keeps_kv = settings.kv_strategy != "recompute"
        self.through = self.keeps_kv and machine.copies == "written-through"
        self.running: list[SimJob] = []
        self.waiting: deque[SimJob] = deque()
        self.holding: deque[SimJob] = deque()
        self.moving: list[SimJob] = []
        self.prefills: dict[SimJob, None] = {}
        self.wait_s = self.start_s = self.reported_s = 0.0
        self._filled: list[tuple[SimJob, int]] = []
        self._stored_s = 0.0
        self.steps = self.processed = 0

    def add(self, job: SimJob, now: float) -> None:
        self.waiting.append(job)

    def schedule(self, now: float) -> Step:
        """Choose one iteration."""
        served, left, evicted = self._serve_running(self.running)
        if not evicted:
            self._admit(left, served, self.holding, self.waiting, self.batch)
        return self._scheduled(served)

    def blocked(self) -> list[SimJob]:
        """Return the jobs that would run now if their KV were on the device."""
        return list(self.holding)

    def finish(self, job: SimJob) -> None:
        """Finish a job whose last token is known."""
        was, job.status = job.status, Status.FINISHED
        if was is Status.RUNNING:
            self._unlist(job)
            self.pool.drop(job, job.computed // self.machine.block_tokens)
        else:
            self._unqueue(job)
        self.pool.forget(job)
        self.host.forget(job)
        self.prefills.pop(job, None)

    def land(self, now: float) -> None:
        """Complete the copies that are due."""
        due = [job for job in self.moving if job.landing_s is not None and job.landing_s <= now]
        for job in due:
            self.moving.remove(job)
            job.landing_s = None
            if job.status is not Status.LOADING:
                self._moved_out(job)

    def next_landing(self) -> float:
        """Return when the next copy will be reported."""
        landings = [job.landing_s for job in self.moving if job.landing_s is not None]
        if self._stored_s > self.reported_s:
            landings.append(self._stored_s)
        return min(landings, default=math.inf)

    def may_leave(self, job: SimJob) -> bool:
        """Return whether the job can be evicted.

        With a connector, vLLM frees no blocks that an iteration in flight still writes.
        """
        return not self.keeps_kv or job.scheduled_step <= self.processed

    def evict(self, job: SimJob) -> None:
        """Take a running job off the device, to the head of the queue."""
        self._leave(job)
        self.waiting.appendleft(job)

    def storing(self, job: SimJob) -> bool:
        """Return whether a copy of the job to the host is in flight: vLLM's connector looks nothing up until it is reported.

        The copy starts with the iteration after the one that filled the block.
        """
        if job.status is not Status.WAITING:
            return False
        return self.processed <= job.stored_step or job.stored_s > self.reported_s

    def hit(self, job: SimJob) -> int:
        """Look up and return the number of blocks that the host can load."""
        job.remembered = self.host.hit(job, job.cached) if self.keeps_kv and job.evictions else 0
        return job.remembered

    def known_hit(self, job: SimJob) -> int:
        """Return the result of the last look-up: look-ups are expensive on the server, which remembers them."""
        return self.hit(job) if job.remembered is None else job.remembered

    def fits(self, job: SimJob, reserved: int = 0) -> bool:
        """Return whether all tokens of the job fit."""
        return self.machine.blocks(job.known) - job.blocks <= self.pool.free - reserved

    def _serve_running(self, running: list[SimJob]) -> tuple[Served, int, bool]:
        served, left, index, evicted = Served(), self.machine.token_budget, 0, False
        while index < len(running) and left > 0:
            job = running[index]
            index += 1
            if job.ending:
                continue
            tokens = min(job.pending, left)
            while not self.pool.grow(job, job.computed + tokens):
                if self.pool.leaving or not self.may_leave(running[-1]):
                    return served, left, evicted
                victim = running.pop()
                self.evict(victim)
                evicted = True
                if victim is job:
                    return served, left, evicted
            served.append((job, tokens))
            left -= tokens
        return served, left, evicted

    def _admit(
        self,
        left: int,
        served: Served,
        holding: deque[SimJob],
        waiting: deque[SimJob],
        most: int,
        load_only: Collection[SimJob] = (),
    ) -> None:
        skipped: tuple[list[SimJob], list[SimJob]] = [], []
        while left > 0 and (holding or waiting) and len(self.running) < most:
            queue, place = (holding, skipped[0]) if holding else (waiting, skipped[1])
            job = queue[0]
            if job.landing_s is not None or job.stale or self.storing(job):
                place.append(queue.popleft())
                continue
            if job.status is Status.WAITING:
                begun = self._loads(job, only=job in load_only)
                if begun is None:
                    break
                if begun:
                    (skipped[0] if job.loading else skipped[1]).append(queue.popleft())
                    continue
            tokens = self._started(job, left)
            if not tokens:
                break
            queue.popleft()
            served.append((job, tokens))
            left -= tokens
        holding.extendleft(reversed(skipped[0]))
        waiting.extendleft(reversed(skipped[1]))

    def _loads(self, job: SimJob, *, only: bool) -> bool | None:
        """Start to load blocks from the host.

        Returns True if the job does not compute now, False if it does, and None if the load does not fit.
        """
        blocks = self.hit(job)
        if not blocks:
            return only
        whole = (job.cached + blocks) * self.machine.block_tokens
        if not self.fits(job) or self.machine.blocks(whole) > self.pool.free - self.reserved():
            return None
        self.pool.revive(job)
        self.pool.grow(job, whole)
        self.host.back(job)
        self.outcome.blocks_in += blocks
        job.computed = min(whole, job.known - 1)
        if self.machine.copies == "blocking":
            self.wait_s += self.machine.copy_s(blocks)
            return False
        job.status = Status.LOADING
        job.landing_s = self.host.transfer(blocks, self.start_s, out=False)
        self.moving.append(job)
        self.prefills[job] = None
        return True

    def _started(self, job: SimJob, left: int) -> int:
        """Give the job a slot and blocks; return its tokens in this iteration, 0 if it does not fit."""
        if not self.fits(job):
            return 0
        if not job.computed:
            job.computed = self.pool.revive(job) * self.machine.block_tokens
        tokens = min(job.pending, left)
        self.pool.grow(job, job.computed + tokens)
        self.outcome.recomputed_tokens += max(0, job.lost - job.computed)
        job.lost = 0
        self.host.back(job)
        job.status = Status.RUNNING
        self.running.append(job)
        return tokens

    def reserved(self) -> int:
        """Return the number of blocks that prefills and loads in progress still need."""
        return sum(max(0, self.machine.blocks(job.known) - job.blocks) for job in self.prefills)

    def _scheduled(self, served: Served) -> Step:
        step = Step(served)
        self._submit()
        self.steps += 1
        for job, tokens in served:
            known = job.known
            if tokens > 1 or not job.generated:
                step.prefill_tokens += tokens
            else:
                step.decodes += 1
                step.context += job.computed
            job.computed += tokens
            job.scheduled_step = self.steps
            if job.pending:
                self.prefills[job] = None
            else:
                self.prefills.pop(job, None)
                step.sampled.append(job)
                job.generated += 1
                job.flying += 1
            job.hashed = min(job.computed, known)
            if self.through:
                self._store(job, job.hashed // self.machine.block_tokens)
        return step

    def _store(self, job: SimJob, upto: int) -> None:
        new = self.host.store(job, upto)
        if new:
            self._filled.append((job, new))
            job.stored_step, job.stored_s = self.steps, 0.0

    def _submit(self) -> None:
        """Start the copies of the iteration before."""
        for job, blocks in self._filled:
            landing = self._stored_s = self.host.transfer(blocks, self.start_s, out=True)
            if job.running:
                job.stored_s = landing
        self._filled.clear()

    def _leave(self, job: SimJob) -> None:
        hashed = max(job.hashed, job.computed - job.flying) // self.machine.block_tokens
        self.outcome.evictions += 1
        self.outcome.blocks_evicted += job.blocks
        job.evictions += 1
        job.lost, job.computed, job.hashed = job.computed, 0, 0
        job.stale, job.flying = job.stale + job.flying, 0
        job.status, job.remembered = Status.WAITING, None
        if job.stored_s > self.start_s:
            # The iteration that evicts waits for them.
            job.stored_step, job.stored_s = self.steps, 0.0
        self.prefills.pop(job, None)
        if self.keeps_kv:
            self.host.record_eviction(job)
            if not self.through:
                return self._copy_out(job, hashed)
        self.pool.drop(job, hashed)
        return None

    def _copy_out(self, job: SimJob, hashed: int) -> None:
        blocks = self.host.store(job, hashed)
        if not blocks or self.machine.copies == "blocking":
            self.wait_s += self.machine.copy_s(blocks)
            return self.pool.drop(job, hashed)
        self.pool.leaving += job.blocks
        job.landing_s = self.host.transfer(blocks, self.start_s, out=True)
        self.moving.append(job)
        return None

    def _moved_out(self, job: SimJob) -> None:
        self.pool.leaving -= job.blocks
        self.pool.drop(job, min(job.host_to, job.blocks))

    def _unlist(self, job: SimJob) -> None:
        self.running.remove(job)

    def _unqueue(self, job: SimJob) -> None:
        self.waiting.remove(job)
