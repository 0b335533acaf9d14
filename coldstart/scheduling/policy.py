"""Interface of a policy, and the choice of one iteration's batch (FastServe, Algorithm 1, lines 22 to 25).

Invariant: iterating a policy yields every live job exactly once, highest priority first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from coldstart.scheduling.job import Job


class Policy(ABC):
    """Order of live jobs, which the engine keeps up to date.

    The engine calls `add` on arrival, `add_service` after each iteration for each job that ran, `tick` before each
    choice, and `remove` once at the end. All times are seconds on one clock.
    """

    moved: int = 0
    """Number of changes of the order since the start, without arrivals and removals."""

    @abstractmethod
    def add(self, job: Job, now: float) -> None: ...

    @abstractmethod
    def remove(self, job: Job) -> None: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Job]: ...

    @abstractmethod
    def __len__(self) -> int: ...

    def add_service(self, job: Job, seconds: float, now: float) -> None:
        """Add `seconds` of service that ended at `now`."""
        job.attained_s += seconds

    def add_decode_step(self, jobs: Iterable[Job], seconds: float, now: float) -> None:
        """Add an iteration of `seconds` that ended at `now` and generated one token for each job."""
        for job in jobs:
            job.generated += 1
            job.computed += 1
            self.add_service(job, seconds, now)

    def tick(self, now: float, batch: int) -> None:  # noqa: B027 - most policies have no clock
        """Advance the clock, and promote jobs where the policy does so; `batch` is B, the maximum batch size."""

    def enst(self, now: float, batch: int) -> Callable[[Job], float]:
        """Return a function from a live job to its estimated next scheduled time, in seconds from now.

        This default is the job's rank divided by B.
        """
        order = {id(job): position for position, job in enumerate(self)}
        return lambda job: order[id(job)] / batch


class Turns:
    """Alternation of the policy's order with the order of arrival, which gets `share` of the time.

    Invariant: |time of the order of arrival - share * all time| is at most one iteration, or one run of
    iterations for which the order was retained. In its share of the time, each job makes at least the
    progress of first come, first served. With enough KV memory and iterations of equal cost, each latency is
    at most 1/share times that of first come, first served, plus two iterations. Prompts and batches of
    unequal cost make this approximate.
    """

    def __init__(self, share: float) -> None:
        self.share, self._oldest = share, False
        self._oldest_s = self._all_s = 0.0

    def add_time(self, seconds: float) -> None:
        """Add the time of the latest iteration, in seconds."""
        self._all_s += seconds
        self._oldest_s += seconds * self._oldest

    def use_arrival_order(self) -> bool:
        """Return whether the next iteration serves in order of arrival."""
        self._oldest = self.share > 0 and self._oldest_s <= self.share * self._all_s
        return self._oldest


def pick(order: Iterable[Job], batch: int, ready: Callable[[Job], bool]) -> list[Job]:
    """Return the first `batch` ready jobs of `order`, which is a policy, or the jobs sorted by arrival."""
    return list(islice((job for job in order if ready(job)), batch))
