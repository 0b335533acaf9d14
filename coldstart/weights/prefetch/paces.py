"""How fast one fetch may read: a token bucket, and the same for several streams, told another rate while they read.

Bytes are taken when they have come and waited for afterwards: a reader that waits leaves its connection's buffer full, and
TCP holds the source back. Invariant: in any t seconds no more than rate * (t + BURST_S) bytes go on, but for the piece that
each stream has in hand.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from threading import Condition
from time import monotonic
from typing import Any

BURST_S = 0.1
"""What a reader that was idle may have at once, in seconds of its rate."""
KEPT = 256


@dataclass(slots=True)
class TokenBucket:
    """`rate` in bytes/s, None without a limit; `level` bytes may go on at `now`, below 0 those that went too early."""

    rate: float | None
    now: float = 0.0
    level: float = 0.0

    def take(self, size: int, now: float) -> None:
        """So many bytes have come."""
        self._fill(now)
        if self.rate is not None:
            self.level -= size

    def change(self, rate: float | None, now: float) -> None:
        """Another rate from now on; what went too early is waited for at that one."""
        self._fill(now)
        self.rate = rate
        self._fill(now)

    def wait_s(self, now: float) -> float:
        """Seconds until no byte is too early any more."""
        self._fill(now)
        return 0.0 if self.rate is None or self.level >= 0 else -self.level / self.rate

    def _fill(self, now: float) -> None:
        if self.rate is None:
            self.level = 0.0
        else:
            self.level = min(BURST_S * self.rate, self.level + self.rate * (now - self.now))
        self.now = now


class FetchPace:
    """That of one fetch, whoever's leases it has. `limited`: a rate was told before its last byte came.

    `served`: some lease of it had all that it wanted; leases before may have been given back without.
    """

    def __init__(self, rate: float | None) -> None:
        self._bucket, self._changed = TokenBucket(rate, monotonic()), Condition()
        self._bytes, self.limited, self.served = 0, False, False
        self._first = self._last = 0.0

    def change(self, rate: float | None) -> None:
        """Another rate, also for those who wait now."""
        with self._changed:
            self._bucket.change(rate, monotonic())
            self._changed.notify_all()

    def take(self, size: int) -> float:
        """So many bytes have come; wait until they may go on. The seconds that took."""
        began = now = monotonic()
        with self._changed:
            self._first = self._first or now
            self._bytes, self._last = self._bytes + size, now
            self.limited = self.limited or self._bucket.rate is not None
            self._bucket.take(size, now)
            while wait_s := self._bucket.wait_s(now):
                self._changed.wait(wait_s)
                now = monotonic()
        return now - began

    def document(self) -> dict[str, Any]:
        """For whoever told the rate: bytes, and seconds from the first to the last of them."""
        with self._changed:
            return {
                "rate": self._bucket.rate,
                "bytes": self._bytes,
                "seconds": self._last - self._first,
                "limited": self.limited,
            }


class Paces:
    """By the name that whoever orders fetches has given each; those of long ago are forgotten."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, FetchPace] = OrderedDict()

    def of(self, name: str, rate: float | None) -> FetchPace:
        """That of a fetch, new at `rate`; one that is known goes on at its own."""
        if name not in self._known:
            self._known[name] = FetchPace(rate)
        self._known.move_to_end(name)
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        return self._known[name]

    def find(self, name: str) -> FetchPace | None:
        """That of a fetch which has begun."""
        return self._known.get(name)
