"""Time that a model stays after a request, as a client states it: seconds, or a duration such as 5m or 1h30m."""

from __future__ import annotations

import re
from math import inf

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)", re.ASCII)
_DURATION = re.compile(rf"(?:{_PART.pattern})+", re.ASCII)
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?", re.ASCII)


def parse_keep_alive(text: str) -> float:
    """Return a time in seconds; infinity for a negative one. Raises ValueError for anything else."""
    given = text.strip()
    size = given.removeprefix("-")
    if _NUMBER.fullmatch(size):
        seconds = float(size)
    elif _DURATION.fullmatch(size):
        seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(size))
    else:
        raise ValueError(
            f"invalid keep-alive time {text[:40]!r}: write seconds, 0, -1, or a duration such as 5m"
        )
    return inf if size != given else seconds
