"""Estimated next scheduled time (FastServe, section 4.2).

ENST(i) = min(T_promote(i), T_execute(i)),
T_execute(i) = 1/B * sum over jobs j of higher priority of the quanta from j's level down to i's, exclusive.
T_execute depends on the level alone, so one pass over the queue lengths gives it for every job.
"""

from __future__ import annotations

from collections.abc import Sequence


def execute_times(counts: Sequence[int], quanta: Sequence[float], batch: int) -> list[float]:
    """T_execute by level, in seconds: T(L) = T(L-1) + q(L-1) * (jobs above L) / B, with T(0) = 0."""
    times, above = [0.0], 0
    for count, quantum in zip(counts[:-1], quanta[:-1], strict=True):
        above += count
        times.append(times[-1] + quantum * above / batch)
    return times
