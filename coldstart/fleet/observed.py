"""Estimates from measured starts: the speed of a link, and the time that a group takes to join.

Only fetches that had the link to themselves measure its speed: a fetch that shares its link, or has a rate limit,
does not. The result is the speed of the slower of link and source. Each measurement has as much weight as all earlier
ones together, so that a change of the link is visible after a few.
"""

from __future__ import annotations

LEAST_S, LEAST_BYTES = 1.0, 4 << 20
"""Minimum duration and size of a fetch that counts: below, its connections have not reached full speed."""
WEIGHT = 0.5


def joining(before: float | None, seconds: float) -> float:
    """Return the estimated seconds from the largest term to the first token, after a start that took `seconds` for it."""
    found = max(0.0, seconds)
    return found if before is None else before + WEIGHT * (found - before)


def speed(before: float | None, size: int, seconds: float) -> float | None:
    """Return the estimated bytes/s after a fetch of `size` bytes; `before` if the fetch is too short, None if unknown."""
    if seconds < LEAST_S or size < LEAST_BYTES:
        return before
    found = size / seconds
    return found if before is None else before + WEIGHT * (found - before)
