"""Rate limit of a fetch: a token bucket that several streams share and whose rate can change while they read.

A reader consumes tokens after it has received bytes, and then waits. While it waits, its connection's buffer fills and
TCP slows the source down.

Invariant: in any t seconds, at most rate * (t + BURST_S) bytes pass, plus the chunk that each stream has just received.
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
    """Token bucket. `rate` is in bytes/s, or None for no limit.

    `available_bytes` is the number of bytes that may pass at time `now`. It is negative after too many bytes have passed.
    """

    rate: float | None
    now: float = 0.0
    available_bytes: float = 0.0

    def consume(self, size: int, now: float) -> None:
        """Consume tokens for `size` received bytes."""
        self._fill(now)
        if self.rate is not None:
            self.available_bytes -= size

    def set_rate(self, rate: float | None, now: float) -> None:
        """Set the rate. A negative number of available bytes is refilled at the new rate."""
        self._fill(now)
        self.rate = rate
        self._fill(now)

    def wait_s(self, now: float) -> float:
        """Return the time in seconds until `available_bytes` is at least 0."""
        self._fill(now)
        return 0.0 if self.rate is None or self.available_bytes >= 0 else -self.available_bytes / self.rate

    def _fill(self, now: float) -> None:
        if self.rate is None:
            self.available_bytes = 0.0
        else:
            self.available_bytes = min(
                BURST_S * self.rate, self.available_bytes + self.rate * (now - self.now)
            )
        self.now = now


class FetchRateLimiter:
    """Rate limit of one fetch, shared by all leases of the fetch.

    `limited` is whether a rate has applied to any byte so far. `served` is whether a lease that has ended received all
    the bytes that it requested. `streams` is the number of streams that fetch with this limiter.
    """

    def __init__(self, rate: float | None) -> None:
        self._bucket, self._changed = TokenBucket(rate, monotonic()), Condition()
        self._bytes, self.streams, self.limited, self.served = 0, 0, False, False
        self._first = self._last = 0.0

    def set_rate(self, rate: float | None) -> None:
        """Set the rate, which also applies to streams that are waiting now."""
        with self._changed:
            self._bucket.set_rate(rate, monotonic())
            self._changed.notify_all()

    def consume_and_wait(self, size: int) -> None:
        """Consume tokens for `size` received bytes, and wait for the rate limit."""
        now = monotonic()
        with self._changed:
            self._first = self._first or now
            self._bytes, self._last = self._bytes + size, now
            self.limited = self.limited or self._bucket.rate is not None
            self._bucket.consume(size, now)
            while wait_s := self._bucket.wait_s(now):
                self._changed.wait(wait_s)
                now = monotonic()

    def document(self) -> dict[str, Any]:
        """Return the limit in bytes/s, the bytes received, the seconds they took, and whether the limit ever applied."""
        with self._changed:
            return {
                "rate": self._bucket.rate,
                "bytes": self._bytes,
                "seconds": self._last - self._first,
                "limited": self.limited,
            }
