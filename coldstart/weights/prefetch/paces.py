"""Rate limit of a fetch: a token bucket that several streams share and whose rate can change while they read.

A reader takes tokens for bytes that it has received, and then waits. Meanwhile its connection's buffer fills, and TCP
slows the source down. In any t seconds, at most rate * (t + BURST_S) bytes pass, plus the chunk that each stream has just
received.
"""

from __future__ import annotations

from dataclasses import dataclass
from threading import Condition
from time import monotonic
from typing import Any

BURST_S = 0.1
"""Burst that an idle reader may receive at once, in seconds of its rate."""


@dataclass(slots=True)
class TokenBucket:
    """Token bucket. `rate` is in bytes/s, None for no limit.

    `level` is the number of bytes that may pass at time `now` (seconds). It is negative after too many bytes.
    """

    rate: float | None
    now: float = 0.0
    level: float = 0.0

    def take_tokens(self, size: int, now: float) -> None:
        """Take tokens for `size` received bytes."""
        self._refill(now)
        if self.rate is not None:
            self.level -= size

    def set_rate(self, rate: float | None, now: float) -> None:
        """Set the rate in bytes/s. A negative level is refilled at the new rate."""
        self._refill(now)
        self.rate = rate
        self._refill(now)

    def compute_wait_s(self, now: float) -> float:
        """Return the time in seconds until the level is at least 0."""
        self._refill(now)
        return 0.0 if self.rate is None or self.level >= 0 else -self.level / self.rate

    def _refill(self, now: float) -> None:
        if self.rate is None:
            self.level = 0.0
        else:
            self.level = min(BURST_S * self.rate, self.level + self.rate * (now - self.now))
        self.now = now


class FetchRateLimit:
    """Rate limit of one fetch, shared by all its leases.

    `limited` is whether a rate applied to any byte so far. `has_served_lease` is whether a lease that ended had received
    all its bytes. `streams` is the number of streams that use this limit.
    """

    def __init__(self, rate: float | None) -> None:
        self._bucket, self._changed = TokenBucket(rate, monotonic()), Condition()
        self._bytes, self.streams, self.limited, self.has_served_lease = 0, 0, False, False
        self._first = self._last = 0.0

    def set_rate(self, rate: float | None) -> None:
        """Set the rate in bytes/s, also for streams that are waiting."""
        with self._changed:
            self._bucket.set_rate(rate, monotonic())
            self._changed.notify_all()

    def wait_for_tokens(self, size: int) -> None:
        """Take tokens for `size` received bytes and wait for the rate limit."""
        now = monotonic()
        with self._changed:
            self._first = self._first or now
            self._bytes, self._last = self._bytes + size, now
            self.limited = self.limited or self._bucket.rate is not None
            self._bucket.take_tokens(size, now)
            while wait_s := self._bucket.compute_wait_s(now):
                self._changed.wait(wait_s)
                now = monotonic()

    def describe(self) -> dict[str, Any]:
        """Return the rate, the bytes, and the time in seconds from the first to the last byte."""
        with self._changed:
            return {
                "rate": self._bucket.rate,
                "bytes": self._bytes,
                "seconds": self._last - self._first,
                "limited": self.limited,
            }
