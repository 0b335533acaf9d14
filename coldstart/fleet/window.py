"""Number of workers that a model needs now (ParaServe, section 6.1).

required = ceil(max(0, waiting + arrivals in W - room) / batch);   groups = ceil(required / s).

`room` is the number of requests that live and starting workers can still accept. The paper subtracts complete live
workers; if all of them were busy, it would never start another one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil


@dataclass(slots=True)
class Window:
    """Arrivals of the last `seconds`, the estimate for the next period."""

    seconds: float
    _arrivals: deque[float] = field(default_factory=deque)

    def arrived(self, now: float) -> None:
        self._arrivals.append(now)

    def count(self, now: float) -> int:
        """Return the number of arrivals after `now - seconds`."""
        while self._arrivals and self._arrivals[0] <= now - self.seconds:
            self._arrivals.popleft()
        return len(self._arrivals)


def required(waiting: int, expected: int, room: int, batch: int) -> int:
    """Return the number of workers to start; 0 if the waiting requests have room."""
    return ceil(max(0, waiting + expected - room) / batch) if waiting > room else 0


def groups(workers: int, ranks: int) -> int:
    """Return the number of pipelines of `ranks` that hold `workers` workers."""
    return ceil(workers / ranks)
