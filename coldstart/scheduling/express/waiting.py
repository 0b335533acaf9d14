"""The requests that could pass, by standing: the best in O(1), whatever their number.

Invariants: a request is in at most one bucket; buckets are ranked by index, anew when the indices are; of a bucket the
newest passes first.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from coldstart.scheduling.express.index import Index, Standing
from coldstart.scheduling.express.lengths import Expected, Kind
from coldstart.scheduling.job import Job

NEWEST = 8
"""Of a bucket, looked at in one choice."""


class Candidates:
    """Jobs under the standing that they had when they were added."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._buckets: dict[Standing, dict[str, Job]] = {}
        self._where: dict[str, Standing] = {}
        self._ranked: list[tuple[float, int, Standing]] = []
        self._version = -1
        self._made = 0
        self._expected: Counter[Standing] = Counter()
        self._value = self._cost = 0.0

    def add(self, job: Job, standing: Standing) -> None:
        self.discard(job.id)
        self._where[job.id] = standing
        bucket = self._buckets.get(standing)
        if bucket is None:
            bucket = self._buckets[standing] = {}
            if self._version == self.index.version:
                insort(self._ranked, self._rank(standing))
        bucket[job.id] = job
        if isinstance(standing.kind, Expected):
            self._count(standing, 1)

    def discard(self, name: str) -> None:
        standing = self._where.pop(name, None)
        if standing is not None:
            del self._buckets[standing][name]
            if isinstance(standing.kind, Expected):
                self._count(standing, -1)

    def best(self, least: float, most: int) -> list[tuple[Job, Standing]]:
        """At most so many jobs of an index above `least`, the highest first, of equals the newest."""
        self._rerank()
        found: list[tuple[Job, Standing]] = []
        for negative, _, standing in self._ranked:
            if -negative <= least or len(found) >= most:
                break
            bucket = self._buckets.get(standing)
            if bucket:
                newest = islice(reversed(bucket.values()), min(NEWEST, most - len(found)))
                found += [(job, standing) for job in newest]
        return found

    def earning(self) -> float | None:
        """What the resource earns with those here whose length is expected, in whatever order: sum of E[1/S] over sum of C.

        None where there are none. Passing pays against just this: c before all j where w_c / C_c > sum w_j / sum C_j.
        """
        if not self._expected:
            return None
        self._rerank()
        return self._value / self._cost if self._cost > 0 else None

    def bins(self) -> Iterator[tuple[int, Kind, int]]:
        """(bin, class, how many) of everybody in here."""
        return ((standing.bin, standing.kind, len(jobs)) for standing, jobs in self._buckets.items() if jobs)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __len__(self) -> int:
        return len(self._where)

    def _count(self, standing: Standing, by: int) -> None:
        self._expected[standing] += by
        if not self._expected[standing]:
            del self._expected[standing]
        if self._version == self.index.version:
            self._sum(standing, by)

    def _sum(self, standing: Standing, count: int) -> None:
        worth = self.index.worth(standing)
        self._value += count * worth.value
        self._cost += count * worth.cost

    def _rank(self, standing: Standing) -> tuple[float, int, Standing]:
        self._made += 1
        return -self.index.worth(standing).index, self._made, standing

    def _rerank(self) -> None:
        if self._version == self.index.version:
            return
        self._version = self.index.version
        self._buckets = {standing: jobs for standing, jobs in self._buckets.items() if jobs}
        self._ranked = sorted(self._rank(standing) for standing in self._buckets)
        self._value = self._cost = 0.0
        for standing, count in self._expected.items():
            self._sum(standing, count)
