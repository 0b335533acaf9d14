"""Number of KV blocks to leave idle for bursts (FastServe, section 4.2: sized from recent arrivals).

Equation: reserve = q-quantile, over recent windows of one load latency each, of the blocks that arrivals in
the window requested. A higher quantile reserves for larger bursts, and no arrivals need no reserve.
"""

from __future__ import annotations

from collections import deque
from math import ceil


class ArrivalReserve:
    """Sliding history of arrivals: `window_s` is the load latency in seconds, `history` the number of windows."""

    def __init__(self, window_s: float, quantile: float = 0.9, history: int = 256) -> None:
        if window_s <= 0 or not 0 <= quantile <= 1 or history <= 0:
            raise ValueError("the reserve needs a positive window and history, and a quantile within 0 and 1")
        self.window_s, self.quantile = window_s, quantile
        self._windows: deque[int] = deque(maxlen=history)
        self._index: int | None = None
        self._current = 0

    def add_arrival(self, blocks: int, now: float) -> None:
        self._advance(now)
        self._current += blocks

    def blocks(self, now: float) -> int:
        """Return the number of blocks to leave idle at `now`."""
        self._advance(now)
        if not self._windows:
            return 0
        ordered = sorted(self._windows)
        return ordered[max(0, ceil(self.quantile * len(ordered)) - 1)]

    def _advance(self, now: float) -> None:
        index = int(now / self.window_s)
        if self._index is None:
            self._index = index
        if index == self._index:
            return
        quiet = min(index - self._index - 1, self._windows.maxlen or 0)
        self._windows.extend([self._current, *[0] * quiet])
        self._index, self._current = index, 0
