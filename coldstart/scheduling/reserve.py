"""Number of KV blocks to keep idle for bursts (FastServe, section 4.2: sized from recent arrivals).

Equation: reserve = q-quantile, over recent windows of one load latency each, of the blocks that arrivals in the window
requested: what arrives while one load makes room. A higher quantile reserves for larger bursts.
"""

from __future__ import annotations

from collections import Counter, deque
from math import ceil

FIRST_WINDOW_S = 0.05
_WEIGHT = 0.2


class ArrivalReserve:
    """Recent arrivals. `window_s` is the latency of a load in seconds: FIRST_WINDOW_S, then a moving average of measured ones.

    `history` windows count, which end at the time of the question.
    """

    def __init__(self, quantile: float = 0.9, window_s: float = FIRST_WINDOW_S, history: int = 256) -> None:
        self.window_s, self.quantile, self.history = window_s, quantile, history
        self._arrivals: deque[tuple[float, int]] = deque()
        self._began: float | None = None
        self._known, self._until = 0, 0.0

    def add_arrival(self, blocks: int, now: float) -> None:
        self._began = now if self._began is None else self._began
        self._arrivals.append((now, blocks))

    def add_latency(self, seconds: float) -> None:
        """Add the measured time of a load."""
        self.window_s = max(1e-6, self.window_s + _WEIGHT * (seconds - self.window_s))

    def blocks(self, now: float) -> int:
        """Return the number of blocks to leave idle at `now`. The value is computed once per window."""
        if now >= self._until:
            self._known, self._until = self._quantile(now), now + self.window_s
        return self._known

    def _quantile(self, now: float) -> int:
        while self._arrivals and self._arrivals[0][0] < now - self.history * self.window_s:
            self._arrivals.popleft()
        if not self._arrivals or self._began is None:
            return 0
        windows = min(self.history, max(1, int((now - self._began) / self.window_s)))
        wanted = Counter[int]()
        for when, blocks in self._arrivals:
            wanted[int((now - when) / self.window_s)] += blocks
        busy = sorted(blocks for window, blocks in wanted.items() if window < windows)
        place = max(0, ceil(self.quantile * windows) - 1) - (windows - len(busy))
        return busy[place] if place >= 0 else 0
