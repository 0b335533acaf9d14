"""FCFS, fixed priority by prompt length, and the shortest-remaining-time oracle (FastServe, section 4.1).

Invariant: FCFS never preempts (a started job precedes every job that arrived later); the other two do.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nsmallest

from coldstart.scheduling.job import Job
from coldstart.scheduling.policy import Policy
from coldstart.scheduling.profile import IterationProfile


class _Listed(Policy):
    """Live jobs in arrival order."""

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

    def served(self, job: Job, seconds: float, now: float) -> None:
        super().served(job, seconds, now)
        job.unserved_since = now

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def __len__(self) -> int:
        return len(self._jobs)


class Fcfs(_Listed):
    """Run to completion in order of arrival."""

    name = "fcfs"
    preemptive = False


class FixedPriority(_Listed):
    """The shorter the prompt's first iteration, the higher the priority, for the job's whole life."""

    name = "fixed-priority"

    def __iter__(self) -> Iterator[Job]:
        return iter(sorted(self._jobs.values(), key=lambda job: self.profile.prefill(job.prompt_tokens)))


class Srpt(_Listed):
    """Shortest remaining processing time: needs the output length, so it exists in simulation only."""

    name = "srpt"

    def __iter__(self) -> Iterator[Job]:
        count = len(self._jobs)
        return iter(nsmallest(count, self._jobs.values(), key=lambda job: job.remaining_s(self.profile)))
