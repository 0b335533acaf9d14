"""Baseline policies: FCFS, fixed priority by prompt length, and the SRPT oracle (FastServe, section 4.1).

Invariant: FCFS never preempts, because a job that has started precedes every job that arrived later. The
other two preempt.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from coldstart.scheduling.job import Job
from coldstart.scheduling.policy import Policy
from coldstart.scheduling.profile import IterationProfile


class _Listed(Policy):
    """Policy over live jobs in order of arrival."""

    def __init__(self, profile: IterationProfile) -> None:
        self.profile = profile
        self._jobs: dict[str, Job] = {}

    def add(self, job: Job, now: float) -> None:
        if job.id in self._jobs:
            raise ValueError(f"job {job.id} is queued already")
        job.unserved_since = now
        self._jobs[job.id] = job

    def remove(self, job: Job) -> None:
        del self._jobs[job.id]

    def add_service(self, job: Job, seconds: float, now: float) -> None:
        super().add_service(job, seconds, now)
        job.unserved_since = now

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def __len__(self) -> int:
        return len(self._jobs)


class Fcfs(_Listed):
    """First come, first served: each job runs to completion."""

    name = "fcfs"
    preemptive = False


class _Ranked(_Listed):
    """Policy over live jobs in order of a key; equal keys are in order of arrival.

    The key of a job changes only when the job is served.
    """

    def __init__(self, profile: IterationProfile) -> None:
        super().__init__(profile)
        self._order: list[tuple[float, int, Job]] = []
        self._places: dict[str, tuple[float, int]] = {}
        self._arrived = 0

    def key(self, job: Job) -> float:
        raise NotImplementedError

    def add(self, job: Job, now: float) -> None:
        super().add(job, now)
        self._arrived += 1
        self._insert(job, self._arrived)

    def remove(self, job: Job) -> None:
        super().remove(job)
        self._take_out(job)

    def __iter__(self) -> Iterator[Job]:
        # Iterate over a copy: the caller may serve or evict jobs during the iteration.
        return (job for _, _, job in list(self._order))

    def _insert(self, job: Job, number: int) -> None:
        self._places[job.id] = (self.key(job), number)
        insort(self._order, (*self._places[job.id], job))

    def _take_out(self, job: Job) -> int:
        key, number = self._places.pop(job.id)
        del self._order[bisect_left(self._order, (key, number), key=lambda entry: entry[:2])]
        return number


class FixedPriority(_Ranked):
    """Fixed priority: a job with a shorter first iteration precedes for its full lifetime."""

    name = "fixed-priority"

    def key(self, job: Job) -> float:
        return self.profile.prefill(job.prompt_tokens)


class Srpt(_Ranked):
    """Shortest remaining processing time; it needs the output length and therefore works only in simulation."""

    name = "srpt"

    def key(self, job: Job) -> float:
        return job.remaining_s(self.profile)

    def add_service(self, job: Job, seconds: float, now: float) -> None:
        super().add_service(job, seconds, now)
        self._insert(job, self._take_out(job))
        self.moved += 1
