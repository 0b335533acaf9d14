"""What starts show that nobody could know before: how fast a link is, and how long a group joins.

A link's speed is from the fetches that had it to themselves.

A fetch that shares its link, or is held to a rate, says nothing of it. What is learned is what such a fetch got: whichever of
link and source was the slower. Each one counts as much as all before it, so that a link that has changed is known after a few.
"""

from __future__ import annotations

LEAST_S, LEAST_BYTES = 1.0, 4 << 20
"""A fetch below either is over before its connections have come up to speed."""
WEIGHT = 0.5


def joining(before: float | None, seconds: float) -> float:
    """Seconds from the largest term to the first token as believed after a start that took so many for it; none below 0."""
    found = max(0.0, seconds)
    return found if before is None else before + WEIGHT * (found - before)


def speed(before: float | None, size: int, seconds: float) -> float | None:
    """Bytes/s as believed after a fetch of `size` bytes; `before` where it says nothing, None where nothing is known."""
    if seconds < LEAST_S or size < LEAST_BYTES:
        return before
    found = size / seconds
    return found if before is None else before + WEIGHT * (found - before)
