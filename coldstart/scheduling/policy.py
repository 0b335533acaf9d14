"""What every policy offers, and the choice of one iteration's batch (FastServe, Algorithm 1, lines 22 to 25).

Invariant: iterating a policy yields every live job exactly once, best first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Protocol

from coldstart.scheduling.job import Job


class Observer(Protocol):
    """Whoever wants to hear of demotions and promotions."""

    def note(self, name: str, start_s: float | None = None, **args: object) -> None: ...


class Policy(ABC):
    """An order over live jobs, kept up to date by the engine that drives it.

    The engine calls `add` on arrival, `served` after each iteration for each job that ran, `tick` before each
    choice and `remove` once at the end. All times are seconds on one clock.
    """

    name: str
    preemptive: bool = True
    observer: Observer | None = None
    moved: int = 0
    """Changes of the order since the start, arrivals and ends aside."""

    @abstractmethod
    def add(self, job: Job, now: float) -> None: ...

    @abstractmethod
    def remove(self, job: Job) -> None: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Job]: ...

    @abstractmethod
    def __len__(self) -> int: ...

    def served(self, job: Job, seconds: float, now: float) -> None:
        """Book `seconds` of service that ended at `now`."""
        job.attained_s += seconds

    def decoded(self, jobs: Iterable[Job], seconds: float, now: float) -> None:
        """Book an iteration of `seconds` that ended at `now` and brought each of these one token."""
        for job in jobs:
            job.generated += 1
            job.computed += 1
            self.served(job, seconds, now)

    def tick(self, now: float, batch: int) -> None:  # noqa: B027 - most policies have no clock
        """Let time pass: promotions, where the policy has any. `batch` is B, the largest batch."""

    def enst(self, now: float, batch: int) -> Callable[[Job], float]:
        """Estimated next scheduled time of any live job, in seconds from now; here, its rank over B."""
        order = {id(job): position for position, job in enumerate(self)}
        return lambda job: order[id(job)] / batch


class Turns:
    """Whether an iteration serves in order of arrival: whenever that order has had no more than `share` of the time.

    Equation: |time of the order of arrival - share * all time| is at most one iteration (or a run of them that was kept
    on). Within its time the jobs ahead of a job under run-to-completion are served as they would be there, or have been
    served already: with enough KV memory, and iterations that take the same whoever is in them, no latency is more than
    1/share times that of first come, first served, and two iterations. Prompts and batches of unequal cost make that
    approximate (benchmarks/scheduling/oldest_share.py).
    """

    def __init__(self, share: float) -> None:
        self.share, self._oldest = share, False
        self._oldest_s = self._all_s = 0.0

    def passed(self, seconds: float) -> None:
        """The latest iteration took so long."""
        self._all_s += seconds
        self._oldest_s += seconds * self._oldest

    def oldest(self, keep: bool = False) -> bool:
        """Choose the order of the next iteration; with `keep` that of the latest goes on."""
        if not keep:
            self._oldest = self.share > 0 and self._oldest_s <= self.share * self._all_s
        return self._oldest


def pick(order: Iterable[Job], batch: int, ready: Callable[[Job], bool]) -> list[Job]:
    """The first `batch` ready jobs of an order: a policy, which is one, or the jobs as they arrived."""
    return list(islice((job for job in order if ready(job)), batch))
