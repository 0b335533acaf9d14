"""Queues Q1 to Qn of falling priority: first in, first out, with O(1) push, removal and move.

Invariant: a job is in at most one queue, at level job.level.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from coldstart.scheduling.job import Job


class LevelQueues:
    """Jobs by level; iteration yields the levels from the highest priority, each from its head."""

    def __init__(self, levels: int) -> None:
        self._levels: list[OrderedDict[str, Job]] = [OrderedDict() for _ in range(levels)]

    def push(self, job: Job, level: int) -> None:
        """Append the job to a level, and set its `level`. Raises ValueError if the level has a job of this id."""
        if job.id in self._levels[level]:
            raise ValueError(f"job {job.id} is in queue {level + 1} already")
        job.level = level
        self._levels[level][job.id] = job

    def remove(self, job: Job) -> None:
        """Remove the job. Raises KeyError if it is not queued."""
        del self._levels[job.level][job.id]

    def move(self, job: Job, level: int) -> None:
        self.remove(job)
        self.push(job, level)

    def counts(self) -> list[int]:
        """Return the queue lengths, highest priority first."""
        return [len(level) for level in self._levels]

    def __len__(self) -> int:
        return sum(map(len, self._levels))

    def __contains__(self, job: Job) -> bool:
        return job.id in self._levels[job.level]

    def __iter__(self) -> Iterator[Job]:
        for level in self._levels:
            yield from level.values()
