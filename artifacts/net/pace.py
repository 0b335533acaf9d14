"""How long an answer may keep its reader waiting: a leaky bucket of patience, filled by bytes.

While the reader waits, patience p falls by a second each second; n bytes give n / floor seconds back, up to `window_s`:
p <- min(window_s, p - waited + n / floor). At p <= 0 the answer is too slow. So an answer of s bytes ends within
window_s + s / floor seconds of waiting, whatever the server does; time that the reader spends itself is not counted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

FLOOR_VARIABLE, PATIENCE_VARIABLE = "COLDSTART_HTTP_FLOOR", "COLDSTART_HTTP_PATIENCE_S"
_HEAD_BYTES = 512 << 10
_FRAMING_BYTES = 4 << 20


class TooSlowError(TimeoutError):
    """Less than the floor came for longer than the window, or more framing than content."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds to connect, for status and headers, and of patience; the floor in bytes per second."""

    connect_s: float = 10.0
    head_s: float = 30.0
    window_s: float = 30.0
    floor: float = 16 << 10


def from_environment(environment: Mapping[str, str] = os.environ) -> Bounds:
    """The defaults, with the floor (bytes/s) and the patience (s, of heads and windows) that the environment sets."""
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
    """The patience left for one answer. First its head, which earns none; then its body, after `body`."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._left = bounds.head_s
        self._in_head = True
        self._came = self._used = 0

    def body(self) -> None:
        """Status and headers are there."""
        self._in_head, self._left, self._came = False, self._bounds.window_s, 0

    def patience(self) -> float:
        """Seconds that the next byte may take. Raises TooSlowError when there is no more."""
        if self._left <= 0:
            raise TooSlowError(self._reason())
        cap = _HEAD_BYTES if self._in_head else 2 * self._used + _FRAMING_BYTES
        if self._came > cap:
            raise TooSlowError("the answer is more framing than content")
        return self._left

    def received(self, count: int, waited_s: float) -> None:
        """So many bytes came off the wire after so long a wait; they may be framing."""
        self._came += count
        earned = 0.0 if self._in_head else count / self._bounds.floor
        self._left = min(self._bounds.window_s, self._left - waited_s + earned)

    def delivered(self, count: int) -> None:
        """So many bytes of the body reached the reader."""
        self._used += count

    def _reason(self) -> str:
        if self._in_head:
            return f"no answer within {self._bounds.head_s:.0f} s"
        return f"less than {self._bounds.floor:.0f} bytes/s for {self._bounds.window_s:.0f} s"
