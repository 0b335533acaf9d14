"""Settings of a range server, its rate limit, and its record of each response."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

FOREVER = -1
_UNLIMITED_CHUNK = 4 << 20


@dataclass
class Sent:
    """One response body: the requested range (`last` is inclusive), the bytes sent, and the user agent."""

    file: str
    first: int
    last: int
    bytes: int
    agent: str


@dataclass
class Settings:
    """Settings that take effect with the next response (`rate`: at once)."""

    rate: float | None = None
    """Bytes per second of all connections together; None is unlimited."""
    latency_s: float = 0.0
    """Wait before every response."""
    refusals: int = 0
    """Number of next requests that are answered with `refusal`; FOREVER does not end."""
    refusal: int = 503
    cut_after: int = 0
    """Number of body bytes after which a cut response and its connection end."""
    cuts: int = 0
    """Number of next responses longer than `cut_after` that are cut; FOREVER does not end."""
    ignore_range: bool = False
    """Answer 200 with the complete file."""
    version: str = ""
    """Part of every ETag: changing it is what a client sees when files were replaced."""
    flips: list[tuple[str, int, int]] = field(default_factory=list)
    """(file, offset, times): the byte arrives inverted in the next `times` responses that hold it."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def take_one(self, name: str) -> bool:
        """Decrement the setting `name` and return whether it was positive."""
        with self._lock:
            left = int(getattr(self, name))
            if left > 0:
                setattr(self, name, left - 1)
            return left != 0

    def flipped(self, file: str, first: int, last: int) -> list[int]:
        """Offsets to invert in a response of bytes first..last of `file`; counts them down."""
        with self._lock:
            hits = [f for f in self.flips if f[0] == file and first <= f[1] <= last and f[2]]
            rest = [f for f in self.flips if f not in hits]
            self.flips = rest + [(f, o, times - (times > 0)) for f, o, times in hits]
        return [offset for _, offset, _ in hits]


class Bucket:
    """Shared rate limit: each caller waits until its bytes are due, in the order of the calls."""

    def __init__(self, settings: Settings, burst_s: float = 0.01) -> None:
        self._settings, self._burst_s = settings, burst_s
        self._due_s, self._lock = 0.0, threading.Lock()

    @property
    def chunk(self) -> int:
        """Return the bytes of 5 ms, which keeps the flow even."""
        rate = self._settings.rate
        return _UNLIMITED_CHUNK if rate is None else max(4096, min(1 << 20, int(rate / 200)))

    def take(self, count: int) -> None:
        """Block until `count` bytes may be sent."""
        if (rate := self._settings.rate) is None:
            return
        with self._lock:
            now_s = time.monotonic()
            self._due_s = max(self._due_s, now_s - self._burst_s) + count / rate
            wait_s = self._due_s - now_s
        if wait_s > 0:
            time.sleep(wait_s)
