"""Reserve bandwidth on a server's link so that every admitted fetch meets its deadline (ParaServe, Algorithm 2, corrected).

While N fetches are pending, a new fetch is offered B/(N+1) if every pending fetch still ends in time with it (equation 3). The
paper's B/N divides by zero on an idle server. The simulation is first advanced to the current time, event by event.
Background fetches after start-up use the remaining bandwidth and do not count toward N.

Invariant: under exact processor sharing, no admitted fetch ends after its deadline, because a share only grows until the
next fetch is admitted, and each admission checks all deadlines. A fetch that is already too late gets no deadline, because
it would then block every later fetch. The link transfers `rate` bytes per second while any fetch is pending. Time is split
at the end of every fetch, so that shares stay correct (unlike in the paper's equation 4).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

CRUMB = 1e-3
"""Remainders of up to this many bytes are rounding errors and count as 0."""


@dataclass(slots=True)
class NetworkLink:
    """Simulated network link that transfers `rate` bytes per second.

    `moved` counts the transferred bytes; `pending` and `background` map fetches to remaining bytes.
    """

    rate: float
    now: float = 0.0
    moved: float = 0.0
    pending: dict[str, float] = field(default_factory=dict)
    background: dict[str, float] = field(default_factory=dict)

    def advance(self, now: float) -> list[tuple[str, float]]:
        """Simulate the transfer until time `now`. Return the fetches that ended, with their end times."""
        ended: list[tuple[str, float]] = []
        while self.rate > 0 and (active := self.pending or self.background):
            each = self.rate / len(active)
            least = min(active.values())
            end = self.now + least / each
            # Bytes that take less than the clock's resolution are transferred now. A timer for their end would be due forever.
            if self.now >= now and end > now:
                break
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
        """Add a fetch of `size` bytes that starts at `self.now`. Raises ValueError if the name is already in use."""
        if name in self.pending or name in self.background:
            raise ValueError(f"a fetch named {name} is already in progress on this link")
        (self.background if background else self.pending)[name] = float(size)

    def drop(self, name: str) -> None:
        """Remove a fetch, whether or not it is complete."""
        self.pending.pop(name, None)
        self.background.pop(name, None)

    def next_end(self) -> float:
        """Return when the next fetch ends if no fetch is added until then, or infinity if none is pending."""
        active = self.pending or self.background
        return self.now + min(active.values()) * len(active) / self.rate if active and self.rate > 0 else inf


class BandwidthReservations:
    """Bandwidth reservations on the network link of one server. `bandwidth` is in bytes per second."""

    def __init__(self, bandwidth: float, now: float = 0.0) -> None:
        self.link, self.deadlines = NetworkLink(bandwidth, now), dict[str, float]()
        self._reported: dict[str, float | None] = {}

    def _age(self, now: float) -> None:
        for name, _ in self.link.advance(now):
            self.deadlines.pop(name, None)

    def offer(self, now: float) -> float:
        """Return the rate for a new fetch in bytes per second, or 0 if it would make another fetch miss its deadline."""
        self._age(now)
        share = self.link.rate / (len(self.link.pending) + 1)
        safe = all(size <= share * (self.deadlines[name] - now) for name, size in self.link.pending.items())
        return share if safe else 0.0

    def claim(self, name: str, size: float, deadline: float, now: float) -> None:
        """Admit a foreground fetch of `size` bytes. `deadline` is infinity if the fetch is already late or needs no deadline.

        Raises ValueError if the fetch would miss its deadline, or would make another fetch miss its deadline.
        """
        share = self.offer(now)
        # Allow a relative error of 1e-9: the deadline was computed from the same offer.
        if deadline < inf and (share <= 0 or size > share * (deadline - now) * (1 + 1e-9) + 1e-3):
            raise ValueError(
                f"cannot admit fetch {name} of {size:.0f} bytes: it or an admitted fetch would miss its deadline"
            )
        self.link.add(name, size)
        self.deadlines[name] = deadline

    def trail(self, name: str, size: float, now: float) -> None:
        """Admit a background fetch of `size` bytes, which uses only the bandwidth that foreground fetches do not use."""
        self._age(now)
        self.link.add(name, size, background=True)

    def finished(self, name: str, now: float) -> None:
        """Release the reservation of a completed fetch, even if some of its bytes remain in the simulation."""
        self._age(now)
        self.link.drop(name)
        self.deadlines.pop(name, None)

    def list_changed_rates(self) -> list[tuple[str, float | None]]:
        """Return the foreground fetches whose rate changed since the last call, each with its new rate in bytes per second.

        The rate is None for a fetch that has the link to itself, so that the fetch measures the speed of the link.
        """
        count = len(self.link.pending)
        each = None if count == 1 else self.link.rate / max(1, count)
        before, self._reported = self._reported, dict.fromkeys(self.link.pending, each)
        return [(name, each) for name in self._reported if name not in before or before[name] != each]

    def measured(self, bandwidth: float, now: float) -> None:
        """Set the bandwidth of the link to a measured value in bytes per second."""
        self._age(now)
        self.link.rate = bandwidth
