"""How many workers a model needs now (ParaServe, section 6.1).

    required = ceil(max(0, waiting + arrivals in W - room) / batch),   groups = ceil(required / s)

`room` is what live and starting workers can still take. The paper subtracts live workers whole; with all of them full it
would then never start another one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil


@dataclass(slots=True)
class Window:
    """The arrivals of the last `seconds`: what is expected of the next."""

    seconds: float
    _arrivals: deque[float] = field(default_factory=deque)

    def arrived(self, now: float) -> None:
        self._arrivals.append(now)

    def count(self, now: float) -> int:
        """Arrivals after `now - seconds`."""
        while self._arrivals and self._arrivals[0] <= now - self.seconds:
            self._arrivals.popleft()
        return len(self._arrivals)


def required(waiting: int, expected: int, room: int, batch: int) -> int:
    """New workers; none while what waits has room."""
    return ceil(max(0, waiting + expected - room) / batch) if waiting > room else 0


def groups(workers: int, ranks: int) -> int:
    """Pipelines of `ranks` that hold so many workers."""
    return ceil(workers / ranks)
