"""Model of one server's network link: equal shares for foreground fetches; background fetches use the remainder.

Invariant: the link moves `rate` bytes a second while any fetch is pending; time is split at the end of every fetch,
so that shares stay correct (unlike the paper's equation 4). Bandwidth reservations use it for predictions, and the
simulator to move bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

CRUMB = 1e-3
"""Bytes that count as none, because of rounding."""


@dataclass(slots=True)
class NetworkLink:
    """One link. `moved` counts bytes; `pending` and `background` are the remaining bytes of each fetch."""

    rate: float
    now: float = 0.0
    moved: float = 0.0
    pending: dict[str, float] = field(default_factory=dict)
    background: dict[str, float] = field(default_factory=dict)

    def advance(self, now: float) -> list[tuple[str, float]]:
        """Move bytes until `now`; return the fetches that ended, with their times."""
        ended: list[tuple[str, float]] = []
        while self.now < now and self.rate > 0 and (active := self.pending or self.background):
            each = self.rate / len(active)
            least = min(active.values())
            end = self.now + least / each
            # Subtract the exact remainder of a fetch that ends now, so that rounding of the clock cannot
            # delay its end.
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
        """Add a fetch at the time `self.now`. Raises ValueError for a name that is already in use."""
        if name in self.pending or name in self.background:
            raise ValueError(f"{name} fetches already")
        (self.background if background else self.pending)[name] = float(size)

    def drop(self, name: str) -> None:
        """Remove a fetch, whether it is complete or not."""
        self.pending.pop(name, None)
        self.background.pop(name, None)

    def next_end(self) -> float:
        """Return when the next fetch ends if none is added; infinity if none is pending."""
        active = self.pending or self.background
        return self.now + min(active.values()) * len(active) / self.rate if active and self.rate > 0 else inf
