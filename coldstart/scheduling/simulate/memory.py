"""The two KV pools and the link between them.

Invariants: 0 <= free <= capacity; a block counts as used until the copy that frees it has landed; each
direction of the link carries one transfer at a time at link_bytes_s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from coldstart.scheduling.simulate.settings import SimSettings
from coldstart.scheduling.simulate.state import Kv, Outcome, SimJob


class Memory:
    def __init__(self, settings: SimSettings, outcome: Outcome) -> None:
        self.settings, self.outcome = settings, outcome
        self.used = self.host_used = self.leaving = 0
        self.in_flight: list[SimJob] = []
        self.hosted: dict[str, SimJob] = {}
        self._link_free = {Kv.LEAVING: 0.0, Kv.LOADING: 0.0}

    @property
    def free(self) -> float:
        capacity = self.settings.device_blocks
        return math.inf if capacity is None else capacity - self.used

    def missing(self, job: SimJob, tokens: int) -> int:
        """Further blocks the job needs to hold `tokens` tokens."""
        return max(0, self.settings.blocks(tokens) - job.blocks)

    def grow(self, job: SimJob, tokens: int) -> None:
        extra = self.missing(job, tokens)
        self._take(job, extra)
        job.kv = Kv.DEVICE

    def release(self, job: SimJob) -> None:
        """The job ended: all it holds is free at once."""
        self._drop(job)

    def discard(self, job: SimJob) -> None:
        """Drop the KV; the job computes its context again."""
        self.outcome.recomputed_tokens += job.job.computed
        self._drop(job)
        job.job.computed = 0

    def move_out(self, job: SimJob, now: float) -> None:
        """Start moving out; without room on the host the KV is dropped, so a full host never blocks."""
        host = self.settings.host_blocks
        if host is not None and self.host_used + job.blocks > host:
            return self.discard(job)
        self.host_used += job.blocks
        self.outcome.blocks_out += job.blocks
        if self.settings.write_through:
            self._landed_out(job)
            return None
        self.leaving += job.blocks
        self._transfer(job, Kv.LEAVING, now)
        return None

    def move_in(self, job: SimJob, now: float) -> None:
        del self.hosted[job.job.id]
        self._count(job.blocks)
        self.outcome.blocks_in += job.blocks
        self._transfer(job, Kv.LOADING, now)

    def land(self, now: float) -> None:
        """Complete the transfers that are due."""
        due = [job for job in self.in_flight if job.landing_s <= now]
        if not due:
            return
        self.in_flight = [job for job in self.in_flight if job.landing_s > now]
        for job in due:
            if job.kv is Kv.LEAVING:
                self.leaving -= job.blocks
                self._landed_out(job)
            else:
                job.kv, job.progressed = Kv.DEVICE, False
                self.host_used -= job.blocks

    def next_landing(self) -> float:
        return min((job.landing_s for job in self.in_flight), default=math.inf)

    def wait_for(self, jobs: Iterable[SimJob], now: float) -> float:
        """Let the given transfers finish on the critical path; the seconds that takes."""
        end = max((job.landing_s for job in jobs), default=now)
        self.land(end)
        return max(0.0, end - now)

    def _transfer(self, job: SimJob, kind: Kv, now: float) -> None:
        start = max(now, self._link_free[kind])
        job.kv = kind
        job.landing_s = start + job.blocks * self.settings.block_bytes / self.settings.link_bytes_s
        self._link_free[kind] = job.landing_s
        self.in_flight.append(job)

    def _landed_out(self, job: SimJob) -> None:
        self.used -= job.blocks
        job.kv = Kv.HOST
        self.hosted[job.job.id] = job

    def _take(self, job: SimJob, extra: int) -> None:
        job.blocks += extra
        self._count(extra)

    def _count(self, extra: int) -> None:
        self.used += extra
        self.outcome.peak_blocks = max(self.outcome.peak_blocks, self.used)

    def _drop(self, job: SimJob) -> None:
        self.used -= job.blocks
        job.blocks, job.kv = 0, Kv.NONE
