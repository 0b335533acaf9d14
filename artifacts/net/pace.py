"""Limit of the time that a response can make its reader wait: a leaky bucket of patience, filled by bytes.

While the reader waits, patience p decreases by a second each second; n bytes add n / floor seconds, up to `window_s`: p
<- min(window_s, p - waited + n / floor). At p <= 0 the response is too slow. So a response of s bytes ends within
window_s + s / floor seconds of waiting. Time that the reader uses itself does not count.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

FLOOR_VARIABLE, PATIENCE_VARIABLE = "COLDSTART_HTTP_FLOOR", "COLDSTART_HTTP_PATIENCE_S"
_HEAD_BYTES = 512 << 10
_FRAMING_BYTES = 4 << 20


class TooSlowError(TimeoutError):
    """Response that was slower than the floor for longer than the window, or had more framing than content."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits in seconds of the connection, of status and headers, and of patience; the floor in bytes per second."""

    connect_s: float = 10.0
    head_s: float = 30.0
    window_s: float = 30.0
    floor: float = 16 << 10


def read_environment(environment: Mapping[str, str] = os.environ) -> Bounds:
    """Return the bounds with the floor (bytes/s) and the patience (s, of head and window) of the environment."""
    patience = _positive(environment, PATIENCE_VARIABLE, Bounds().window_s)
    return Bounds(
        head_s=patience, window_s=patience, floor=_positive(environment, FLOOR_VARIABLE, Bounds().floor)
    )


def _positive(environment: Mapping[str, str], name: str, otherwise: float) -> float:
    try:
        value = float(environment.get(name, ""))
    except ValueError:
        return otherwise
    return value if 0.0 < value < float("inf") else otherwise


class Pace:
    """Remaining patience for one response: first for its head, then, after `body`, for its body."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._left = bounds.head_s
        self._in_head = True
        self._came = self._used = 0

    def body(self) -> None:
        """Record that status and headers were received."""
        self._in_head, self._left, self._came = False, self._bounds.window_s, 0

    def patience(self) -> float:
        """Return the seconds that the next byte may take. Raises TooSlowError if none are left."""
        if self._left <= 0:
            raise TooSlowError(self._reason())
        cap = _HEAD_BYTES if self._in_head else 2 * self._used + _FRAMING_BYTES
        if self._came > cap:
            raise TooSlowError("the response has more bytes of headers and chunk framing than of content")
        return self._left

    def received(self, count: int, waited_s: float) -> None:
        """Record `count` bytes from the socket, which may be framing, and the time that the reader waited."""
        self._came += count
        earned = 0.0 if self._in_head else count / self._bounds.floor
        self._left = min(self._bounds.window_s, self._left - waited_s + earned)

    def delivered(self, count: int) -> None:
        """Record the bytes of the body that reached the reader."""
        self._used += count

    def _reason(self) -> str:
        if self._in_head:
            return f"no response within {self._bounds.head_s:.0f} s"
        return f"less than {self._bounds.floor:.0f} bytes/s for {self._bounds.window_s:.0f} s"
