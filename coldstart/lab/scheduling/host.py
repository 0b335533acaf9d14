"""The host's copies of KV blocks, and the link.

Invariants: used <= capacity; the link carries one transfer at a time each way. As in the server's policy for the host's
cache a finished request's blocks go first; then those of the least recently stored request on the device, from the
first block on, and only then those of requests that were evicted.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from coldstart.lab.scheduling.settings import SimSettings
from coldstart.lab.scheduling.state import Outcome, SimJob


class Host:
    def __init__(self, settings: SimSettings, outcome: Outcome) -> None:
        self.settings, self.outcome = settings, outcome
        self.capacity = math.inf if settings.host_blocks is None else settings.host_blocks
        self.used = 0
        self.away: OrderedDict[SimJob, None] = OrderedDict()
        self._near: OrderedDict[SimJob, None] = OrderedDict()
        self._link_free = {True: 0.0, False: 0.0}

    def store(self, job: SimJob, upto: int) -> int:
        """Keep the job's blocks up to `upto`; how many are new there, 0 where the host has no room."""
        new = upto - job.host_to
        if new <= 0 or not self._room(new, job):
            return 0
        self.used += new
        job.host_to = upto
        self.outcome.blocks_out += new
        (self.away if job in self.away else self._near)[job] = None
        if job in self._near:
            self._near.move_to_end(job)
        return new

    def hit(self, job: SimJob, local: int) -> int:
        """Blocks that a load brings beyond the first `local`, which the device still has."""
        return max(0, job.host_to - local) if job.host_from <= local else 0

    def left(self, job: SimJob) -> None:
        """The job was evicted."""
        self._near.pop(job, None)
        self.away[job] = None

    def back(self, job: SimJob) -> None:
        """The job runs again, or loads."""
        if job in self.away:
            del self.away[job]
            if job.host_to > job.host_from:
                self._near[job] = None

    def forget(self, job: SimJob) -> None:
        self.used -= job.host_to - job.host_from
        job.host_from = job.host_to
        self.away.pop(job, None)
        self._near.pop(job, None)

    def transfer(self, blocks: int, now: float, *, out: bool) -> float:
        """Queue a copy; when it lands."""
        landing = max(now, self._link_free[out]) + self.settings.copy_s(blocks)
        self._link_free[out] = landing
        return landing

    def _room(self, new: int, keeper: SimJob) -> bool:
        if self.used + new <= self.capacity:
            return True
        if new > self.capacity:
            return False
        for table in (self._near, self.away):
            for job in list(table):
                if job is not keeper:
                    self._shrink(job, new)
                if self.used + new <= self.capacity:
                    return True
        return False

    def _shrink(self, job: SimJob, new: int) -> None:
        dropped = min(job.host_to - job.host_from, int(self.used + new - self.capacity))
        job.host_from += dropped
        self.used -= dropped
        if job.host_from == job.host_to:
            self._near.pop(job, None)
