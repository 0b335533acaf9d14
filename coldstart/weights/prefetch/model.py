"""One model in the prefetcher: its board, its memory, what was fetched for it, and how its source is doing.

Everything here belongs to the daemon's main thread except `count`, which the streams call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from time import monotonic
from typing import Any

from coldstart.weights.prefetch.byte_ranges import Ranges
from coldstart.weights.prefetch.range_source import is_local, origin, shown
from coldstart.weights.prefetch.region import SharedRegion
from coldstart.weights.prefetch.region_layout import RegionLayout
from coldstart.weights.prefetch.schedule import Board, UnitEntry, UnitState

MAX_WRONG = 3
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 2.0
_ERRORS_KEPT = 20


class PrefetchedModel:
    """`region` is None for a local directory: the page cache is its memory."""

    def __init__(self, key: str, address: str, environment: Mapping[str, str], layout: RegionLayout) -> None:
        self.key, self.address, self.environment, self.layout = key, address, environment, layout
        self.board = Board(layout)
        self.region = None if is_local(address) else SharedRegion(layout.total)
        self.leases = 0
        self.generation = 0  # of credentials and of patience: the error of an older job does not count
        self.flying = 0  # units that streams are working on
        self.wanted_at = monotonic()  # when it was last wanted while none was
        self.origin = origin(address)
        self.taken = self.evicted = self._given_up = False
        self.reported: set[str] = set()  # timelines that have its span already
        self.used = monotonic()
        self.began: float | None = None
        self.ended: float | None = None
        self.errors: deque[str] = deque(maxlen=_ERRORS_KEPT)
        self.retry_at = 0.0
        self._delay = _FIRST_DELAY_S
        self._down_since: float | None = None
        self._lock = threading.Lock()
        self._fetched = 0
        self._distinct = [Ranges() for _ in layout.files]

    def newest(self, environment: Mapping[str, str]) -> None:
        """The credentials of whoever attached last count; what fails with older ones says nothing of these."""
        if environment != self.environment:
            self.environment, self.generation = environment, self.generation + 1

    def count(self, file: int, start: int, size: int) -> None:
        """So many bytes of a file have come, from byte `start`."""
        with self._lock:
            self._fetched += size
            self._distinct[file].add(start, start + size)

    @property
    def charged(self) -> int:
        """Bytes that this model takes, or will when all that is planned is there."""
        if self.region is None:
            return 0
        return max(self.board.planned_bytes, self.region.allocated)

    def start(self, entry: UnitEntry) -> None:
        """A unit is handed to a stream."""
        entry.state = UnitState.BUSY
        self.flying += 1
        self.began = self.began if self.began is not None else monotonic()

    def note(self, error: str) -> None:
        """Keep an error for `status`; the same one in a row once."""
        if not self.errors or self.errors[-1] != error:
            self.errors.append(error)

    def arrived(self) -> None:
        """A unit came: its source is well."""
        self.ended, self._down_since, self.retry_at, self._delay = monotonic(), None, 0.0, _FIRST_DELAY_S

    def unavailable(self, patience_s: float) -> bool:
        """Its source did not answer: wait longer and longer. False when it has not answered for `patience_s`."""
        now = monotonic()
        if self._down_since is None:
            self._down_since = now
        if now >= self.retry_at:  # four streams that meet the same end count once
            self.retry_at, self._delay = now + self._delay, min(2 * self._delay, _LONGEST_DELAY_S)
        return not self._given_up and now - self._down_since < patience_s

    def give_up(self) -> None:
        """Give up on the source: planned units failed, and those under way will, unless `renew_patience` is called."""
        self._given_up = True
        self._down_since, self.retry_at, self._delay = None, 0.0, _FIRST_DELAY_S

    def renew_patience(self) -> None:
        """Try a source that was given up again, whatever the jobs that are still under way report."""
        if self._given_up:
            self._given_up, self.generation = False, self.generation + 1

    def stats(self) -> dict[str, Any]:
        """Bytes wanted, ready and fetched (so many of them again), and the times of first and last."""
        with self._lock:
            fetched, distinct = self._fetched, sum(ranges.total for ranges in self._distinct)
        return {
            "wanted_bytes": self.board.planned_bytes,
            "ready_bytes": self.board.ready_bytes,
            "fetched_bytes": fetched,
            "refetched": fetched - distinct,
            "began": self.began,
            "ended": self.ended,
            "errors": list(self.errors),
        }

    def brief(self) -> dict[str, Any]:
        """For the timeline."""
        stats = self.stats()
        return {
            "source": shown(self.address),
            "fetched_bytes": stats["fetched_bytes"],
            "ready_bytes": stats["ready_bytes"],
        }

    def document(self) -> dict[str, Any]:
        """For `status`."""
        stats = self.stats()
        seconds = (self.ended or 0.0) - (self.began or 0.0)
        return {
            "source": shown(self.address),
            "key": self.key,
            "total_bytes": sum(file.size for file in self.layout.files),
            "memory_bytes": self.charged,
            "leases": self.leases,
            "bytes_per_s": round(stats["fetched_bytes"] / seconds) if seconds > 0 else None,
            **stats,
        }

    def close(self) -> None:
        """Give its memory back."""
        if self.region is not None:
            self.region.close()
