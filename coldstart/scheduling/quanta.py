"""Quanta q1 < q2 < ... < qn with q(i+1) = growth * q(i), and the level that an iteration time asks for.

Equation (FastServe, Algorithm 1, line 8): level(t) = min i such that q(i) >= t; the last takes the rest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from coldstart.scheduling.profile import IterationProfile

DECODES_COVERED = 4096
"""A job may decode this many tokens before it sinks to the last queue, unless told otherwise."""

# Two measurements of one iteration never agree to the last digit: equal times must ask for equal levels.
_SLACK = 1 - 1e-9


def geometric(first_s: float, levels: int, growth: float = 2.0) -> tuple[float, ...]:
    """Raises ValueError unless first_s > 0, levels > 0 and growth > 1."""
    if first_s <= 0 or levels <= 0 or growth <= 1:
        raise ValueError("quanta need a positive first quantum, at least one level and a growth above 1")
    return tuple(first_s * growth**i for i in range(levels))


def join_level(quanta: Sequence[float], seconds: float) -> int:
    """The highest-priority level (0 is Q1) whose quantum is at least `seconds`."""
    return min(bisect_left(quanta, seconds * _SLACK), len(quanta) - 1)


def levels_for(profile: IterationProfile, first_s: float, growth: float = 2.0) -> int:
    """Levels enough for the longest profiled prefill and for DECODES_COVERED tokens of decoding."""
    longest = max(profile.prefill.ys[-1], DECODES_COVERED * profile.decode.ys[0])
    levels = 1
    while first_s * growth ** (levels - 1) < longest:
        levels += 1
    return levels
