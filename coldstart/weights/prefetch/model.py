"""State of the model that a prefetcher fetches: its board, its memory, its fetched bytes, and the health of its source.

Only the daemon's main thread uses this state.

Invariant: max(planned, allocated) bytes are at most the memory budget. A request that does not fit is rejected before any of
its bytes are planned.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

from coldstart.weights.prefetch import region_layout
from coldstart.weights.prefetch.byte_ranges import Ranges
from coldstart.weights.prefetch.errors import PrefetchRefusedError
from coldstart.weights.prefetch.range_source import is_local, redact
from coldstart.weights.prefetch.region import Allocator, SharedRegion
from coldstart.weights.prefetch.region_layout import RegionLayout
from coldstart.weights.prefetch.schedule import Board, UnitEntry, UnitState

MAX_WRONG = 3
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 2.0
_ERRORS_KEPT = 20


def name_weights(address: str, plan: bytes) -> str:
    """Return the name of the weights of a normalised source and a plan (as JSON): 32 hexadecimal digits."""
    return hashlib.sha256(address.encode() + b"\n" + plan).hexdigest()[:32]


def open_model(address: str, plan: bytes, environment: Mapping[str, str]) -> PrefetchedModel:
    """Return the model of a normalised source and a plan (as JSON). Raises PrefetchRefusedError."""
    try:
        document = json.loads(plan)
    except (ValueError, RecursionError) as error:
        raise PrefetchRefusedError(f"the weights plan is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise PrefetchRefusedError("the weights plan is not a JSON object")
    layout = region_layout.read(document)
    try:
        return PrefetchedModel(name_weights(address, plan), address, environment, layout)
    except OSError as error:
        raise PrefetchRefusedError(
            f"cannot create shared memory of {layout.total} bytes: {error.strerror}"
        ) from error


class PrefetchedModel:
    """Model with its units and memory; `region` is None for a local directory, whose memory is the page cache."""

    def __init__(self, key: str, address: str, environment: Mapping[str, str], layout: RegionLayout) -> None:
        self.key, self.address, self.environment, self.layout = key, address, environment, layout
        self.board = Board(layout)
        self.region = None if is_local(address) else SharedRegion(layout.total)
        self.generation = 0  # number of changes of credentials or retries; errors of older jobs are ignored
        self.taken = self._aborted = False
        self.reported: set[str] = set()  # timeline files that have the span of this model
        self._allocator = Allocator()
        self.began: float | None = None
        self.ended: float | None = None
        self.errors: deque[str] = deque(maxlen=_ERRORS_KEPT)
        self.retry_at = 0.0
        self._delay = _FIRST_DELAY_S
        self._down_since: float | None = None
        self.fetched = self.refetched = 0

    def update_environment(self, environment: Mapping[str, str]) -> None:
        """Use the credentials of the latest client; errors of jobs with older credentials are ignored."""
        if environment != self.environment:
            self.environment, self.generation = environment, self.generation + 1

    @property
    def charged(self) -> int:
        """Return the bytes of memory that this model uses, or will use when all planned bytes are fetched."""
        if self.region is None:
            return 0
        return max(self.board.planned_bytes, self.region.allocated)

    def want(self, wanted: Sequence[Ranges], budget: int) -> list[UnitEntry]:
        """Plan the requested bytes.

        Raises:
            PrefetchRefusedError: The model would need more than `budget` bytes.
        """
        units = self.board.new_units(wanted)
        needed = self.charged + sum(unit.size for unit in units)
        if self.region is not None and units and needed > budget:
            raise PrefetchRefusedError(
                f"the request needs {needed} bytes, but the prefetcher may hold {budget} "
                "(coldstart prefetch stop, then start --memory SIZE)"
            )
        self.renew_patience()
        entries = self.board.want(wanted, units)
        if self.region is not None and units:
            bases = [file.base for file in self.layout.files]
            pieces = [(bases[unit.file] + a, bases[unit.file] + b) for unit in units for a, b in unit.pieces]
            self._allocator.allocate(self.region, pieces)
        return entries

    def start(self, entry: UnitEntry) -> None:
        """Mark a unit as being fetched by a stream."""
        entry.state = UnitState.BUSY
        self.began = self.began if self.began is not None else monotonic()

    def note(self, error: str) -> None:
        """Append an error for `status`, unless it repeats the previous one."""
        if not self.errors or self.errors[-1] != error:
            self.errors.append(error)

    def record_arrival(self) -> None:
        """Record that a unit arrived: the source works."""
        self.ended, self._down_since, self.retry_at, self._delay = monotonic(), None, 0.0, _FIRST_DELAY_S

    def delay_retry(self, patience_s: float) -> bool:
        """Delay the next attempt after a failed one; return False if the source failed for `patience_s` seconds."""
        now = monotonic()
        if self._down_since is None:
            self._down_since = now
        if now >= self.retry_at:  # count one outage once, although each stream reports it
            self.retry_at, self._delay = now + self._delay, min(2 * self._delay, _LONGEST_DELAY_S)
        return not self._aborted and now - self._down_since < patience_s

    def abort(self) -> None:
        """Treat the source as failed, also for units that are being fetched, until `renew_patience` is called."""
        self._aborted = True
        self._down_since, self.retry_at, self._delay = None, 0.0, _FIRST_DELAY_S

    def renew_patience(self) -> None:
        """Retry a source after `abort`. Results of fetches that started earlier are ignored."""
        if self._aborted:
            self._aborted, self.generation = False, self.generation + 1

    def stats(self) -> dict[str, Any]:
        """Return the wanted, ready, fetched and refetched bytes, the errors, and the times of the first and last byte."""
        return {
            "wanted_bytes": self.board.planned_bytes,
            "ready_bytes": self.board.ready_bytes,
            "fetched_bytes": self.fetched,
            "refetched": self.refetched,
            "began": self.began,
            "ended": self.ended,
            "errors": list(self.errors),
        }

    def brief(self) -> dict[str, Any]:
        """Return the members of the timeline span."""
        stats = self.stats()
        return {
            "source": redact(self.address),
            "fetched_bytes": stats["fetched_bytes"],
            "ready_bytes": stats["ready_bytes"],
        }

    def document(self) -> dict[str, Any]:
        """Return the model's entry in `status`."""
        stats = self.stats()
        seconds = (self.ended or 0.0) - (self.began or 0.0)
        return {
            "source": redact(self.address),
            "key": self.key,
            "total_bytes": sum(file.size for file in self.layout.files),
            "memory_bytes": self.charged,
            "bytes_per_s": round(stats["fetched_bytes"] / seconds) if seconds > 0 else None,
            **stats,
        }
