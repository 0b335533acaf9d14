"""Which KV leaves device memory and which comes back (FastServe, section 4.2).

Invariants: victims leave in descending ENST, loads start in ascending ENST, and no job is evicted to load one
of larger ENST.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from coldstart.scheduling.job import Job

Enst = Callable[[Job], float]
Blocks = Callable[[Job], int]


@dataclass(frozen=True, slots=True)
class Swaps:
    """One step's decisions: jobs to move out, then jobs to start loading, each in the order to do it."""

    out: tuple[Job, ...] = ()
    into: tuple[Job, ...] = ()


def victims(resident: Iterable[Job], enst: Enst, blocks: Blocks, needed: int) -> list[Job]:
    """The fewest largest-ENST jobs whose blocks cover `needed`; all of them if they do not."""
    chosen: list[Job] = []
    for job in sorted(resident, key=enst, reverse=True):
        if needed <= 0:
            break
        chosen.append(job)
        needed -= blocks(job)
    return chosen


def prefetches(hosted: Iterable[Job], enst: Enst, blocks: Blocks, free: int) -> list[Job]:
    """Smallest ENST first, while they fit; the first that does not fit ends it, so nobody overtakes it."""
    chosen: list[Job] = []
    for job in sorted(hosted, key=enst):
        free -= blocks(job)
        if free < 0:
            break
        chosen.append(job)
    return chosen


def plan(
    resident: Iterable[Job],
    due: Iterable[Job],
    hosted: Iterable[Job],
    *,
    enst: Enst,
    blocks: Blocks,
    free: int,
    reserve: int,
    urgent: int,
) -> Swaps:
    """Proactive swapping for one step.

    resident: jobs on the device that may leave (not picked now, and served since they came back);
    due: jobs on the host whose rank earns a slot now; hosted: the other jobs on the host; free, reserve,
    urgent: blocks that are free, that are kept for arrivals, and that the picked batch needs now.
    Due jobs may use the reserve, the others may not.
    """
    due = list(due)
    out = victims(resident, enst, blocks, urgent + reserve + sum(map(blocks, due)) - free)
    spare = free + sum(map(blocks, out)) - urgent
    first = prefetches(due, enst, blocks, spare)
    later = prefetches(hosted, enst, blocks, spare - reserve - sum(map(blocks, due)))
    soonest = min(map(enst, out), default=inf)
    return Swaps(tuple(out), tuple(job for job in first + later if enst(job) <= soonest))
