"""Quanta q1 < q2 < ... < qn with q(i+1) = growth * q(i), and the level of an iteration time.

Equation (FastServe, Algorithm 1, line 8): level(t) = min i such that q(i) >= t; longer times get the last
level.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from coldstart.scheduling.profile import IterationProfile

DECODES_COVERED = 4096
"""Number of tokens that a job can decode before it reaches the last queue, with the default number of levels."""

# Measurements of one iteration differ in the last digits; equal times must get equal levels.
_SLACK = 1 - 1e-9


def geometric(first_s: float, levels: int, growth: float = 2.0) -> tuple[float, ...]:
    """Return `levels` quanta in seconds, starting at `first_s`.

    Raises:
        ValueError: `first_s` or `levels` is not positive, or `growth` is not above 1.
    """
    if first_s <= 0 or levels <= 0 or growth <= 1:
        raise ValueError("quanta need a positive first quantum, at least one level and a growth above 1")
    return tuple(first_s * growth**i for i in range(levels))


def join_level(quanta: Sequence[float], seconds: float) -> int:
    """Return the highest-priority level (0 is Q1) whose quantum is at least `seconds`."""
    return min(bisect_left(quanta, seconds * _SLACK), len(quanta) - 1)


def count_levels(profile: IterationProfile, first_s: float, growth: float = 2.0) -> int:
    """Return the number of levels for the longest profiled prefill and for DECODES_COVERED decoded tokens."""
    longest = max(profile.prefill.ys[-1], DECODES_COVERED * profile.decode.ys[0])
    levels = 1
    while first_s * growth ** (levels - 1) < longest:
        levels += 1
    return levels
