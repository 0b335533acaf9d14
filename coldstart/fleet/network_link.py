"""One server's network link, shared: foreground fetches in equal parts, background ones with what those leave.

Invariant: the link moves `rate` bytes a second while anything is pending; time is cut at every end, so that shares are right
across a departure (the paper's equation 4 is not). Bandwidth reservations predict with it, and the simulator moves bytes with
it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

CRUMB = 1e-3
"""Bytes that rounding may leave."""


@dataclass(slots=True)
class NetworkLink:
    """`moved` counts bytes; `pending` and `background` are what is left of each fetch."""

    rate: float
    now: float = 0.0
    moved: float = 0.0
    pending: dict[str, float] = field(default_factory=dict)
    background: dict[str, float] = field(default_factory=dict)

    def advance(self, now: float) -> list[tuple[str, float]]:
        """Fetches that ended until `now`, with when."""
        ended: list[tuple[str, float]] = []
        while self.now < now and self.rate > 0 and (active := self.pending or self.background):
            each = self.rate / len(active)
            least = min(active.values())
            end = self.now + least / each
            # What ends now is subtracted as it is, so that no rounding of the clock can hold it back.
            part, until = (least, end) if end <= now else ((now - self.now) * each, now)
            self.moved += part * len(active)
            self.now = until
            for name in list(active):
                active[name] -= part
                if active[name] <= CRUMB:
                    del active[name]
                    ended.append((name, until))
        self.now = max(self.now, now)
        return ended

    def add(self, name: str, size: float, *, background: bool = False) -> None:
        """A fetch from `self.now` on. Raises ValueError for a name that fetches already."""
        if name in self.pending or name in self.background:
            raise ValueError(f"{name} fetches already")
        (self.background if background else self.pending)[name] = float(size)

    def drop(self, name: str) -> None:
        """It fetches no more, done or not."""
        self.pending.pop(name, None)
        self.background.pop(name, None)

    def next_end(self) -> float:
        """When the next fetch ends if none is added; infinity where none is pending."""
        active = self.pending or self.background
        return self.now + min(active.values()) * len(active) / self.rate if active and self.rate > 0 else inf
