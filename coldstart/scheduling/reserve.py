"""Number of KV blocks to keep free for bursts, computed from recent arrivals (FastServe, section 4.2).

Equation: reserve = q-quantile of the blocks requested per window, over recent windows that are as long as one KV load. So
the reserve covers the requests that arrive while a load frees memory. A higher quantile covers larger bursts.
"""

from __future__ import annotations

from collections import Counter, deque
from math import ceil

FIRST_WINDOW_S = 0.05
_AVERAGE_WEIGHT = 0.2


class ArrivalReserve:
    """Number of KV blocks to reserve, computed from the arrivals in the last `history` windows.

    `window_s` is the duration of a KV load in seconds: initially FIRST_WINDOW_S, then a moving average of measurements.
    """

    def __init__(self, quantile: float = 0.9, window_s: float = FIRST_WINDOW_S, history: int = 256) -> None:
        self.window_s, self.quantile, self.history = window_s, quantile, history
        self._arrivals: deque[tuple[float, int]] = deque()
        self._first_arrival_s: float | None = None
        self._blocks, self._valid_until = 0, 0.0

    def add_arrival(self, blocks: int, now: float) -> None:
        self._first_arrival_s = now if self._first_arrival_s is None else self._first_arrival_s
        self._arrivals.append((now, blocks))

    def add_load_time(self, seconds: float) -> None:
        """Record the measured duration of a KV load, in seconds."""
        self.window_s = max(1e-6, self.window_s + _AVERAGE_WEIGHT * (seconds - self.window_s))

    def compute_reserved_blocks(self, now: float) -> int:
        """Return the number of blocks to keep free at `now`, which is recomputed once per window."""
        if now >= self._valid_until:
            self._blocks, self._valid_until = self._compute_quantile(now), now + self.window_s
        return self._blocks

    def _compute_quantile(self, now: float) -> int:
        while self._arrivals and self._arrivals[0][0] < now - self.history * self.window_s:
            self._arrivals.popleft()
        if not self._arrivals or self._first_arrival_s is None:
            return 0
        windows = min(self.history, max(1, int((now - self._first_arrival_s) / self.window_s)))
        requested_blocks = Counter[int]()
        for arrival_s, blocks in self._arrivals:
            requested_blocks[int((now - arrival_s) / self.window_s)] += blocks
        busy = sorted(blocks for window, blocks in requested_blocks.items() if window < windows)
        rank = max(0, ceil(self.quantile * windows) - 1) - (windows - len(busy))
        return busy[rank] if rank >= 0 else 0
