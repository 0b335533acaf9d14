"""State of the model that a prefetcher fetches: its memory, its counts of bytes, and the health of its source.

Only the daemon's main thread uses this state, and streams write to the memory. Invariant: the bytes that leases requested
are at most the memory budget. A request that does not fit is rejected before any of its bytes are planned.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from coldstart.weights.prefetch import PrefetchRefusedError, layout
from coldstart.weights.prefetch.layout import Check
from coldstart.weights.prefetch.schedule import Board
from coldstart.weights.prefetch.sources import is_local, redact

MAX_WRONG = 3
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 2.0
_ERRORS_KEPT = 20
_STEP = 32 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedRegion:
    """Shared memory of `total` bytes: a memfd, which the kernel frees when its last holder closes it or dies.

    Writers use pwrite and do not map the region: a page is allocated without a fault and holds only verified bytes.
    A thread allocates pages before they are written (the benchmarks' RESULTS has the cost of the first touch).
    Raises OSError if the kernel cannot create a memfd.
    """

    def __init__(self, total: int) -> None:
        self._descriptor = os.memfd_create("coldstart-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._descriptor, total)
        # Seal the size: truncation would crash the processes that map the region.
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)

    @property
    def allocated(self) -> int:
        """Return the number of allocated bytes."""
        return os.fstat(self._descriptor).st_blocks * 512

    def reader(self) -> int:
        """Return a read-only descriptor of the region; the caller closes it."""
        return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def write(self, offset: int, data: memoryview) -> None:
        """Write verified bytes. Raises OSError if memory is short."""
        while data:
            written = os.pwrite(self._descriptor, data, offset)
            offset, data = offset + written, data[written:]

    def allocate(self, checks: Iterable[Check]) -> None:
        """Allocate the pages of these checks in the background."""
        spans = [(check.file.base + check.start, check.end - check.start) for check in checks]
        threading.Thread(target=self._allocate, args=(spans,), name="allocator", daemon=True).start()

    def _allocate(self, spans: Iterable[tuple[int, int]]) -> None:
        with suppress(OSError):  # the write of such bytes fails too, and reports which bytes it was for
            for start, size in spans:
                for step in range(start, start + size, _STEP):
                    os.posix_fallocate(self._descriptor, step, min(_STEP, start + size - step))


def name_weights(address: str, plan: bytes) -> str:
    """Return the name of the weights of a normalised source and a plan (as JSON): 32 hexadecimal digits."""
    return hashlib.sha256(address.encode() + b"\n" + plan).hexdigest()[:32]


class PrefetchedModel:
    """Model of a normalised source and a plan (as JSON); `region` is None for a local directory, which has the page cache.

    Raises PrefetchRefusedError.
    """

    def __init__(self, address: str, plan: bytes) -> None:
        try:
            document = json.loads(plan)
        except (ValueError, RecursionError) as error:
            raise PrefetchRefusedError(f"the weights plan is not valid JSON: {error}") from error
        if not isinstance(document, dict):
            raise PrefetchRefusedError("the weights plan is not a JSON object")
        self.address, self.layout = address, layout.read(document)
        self.key, self.board = name_weights(address, plan), Board(self.layout)
        try:
            self.region = None if is_local(address) else SharedRegion(self.layout.total)
        except OSError as error:
            raise PrefetchRefusedError(
                f"cannot create shared memory of {self.layout.total} bytes: {error.strerror}"
            ) from error
        self.environment: Mapping[str, str] = {}
        self.requests = 0
        """Number of requests; an error of a fetch that began before the latest request is ignored."""
        self.wrong = Counter[int]()
        """Number of fetches with wrong bytes, by check."""
        self.began: float | None = None
        self.ended: float | None = None
        self.errors: deque[str] = deque(maxlen=_ERRORS_KEPT)
        self.fetched = self.refetched = 0
        self.retry_at, self._delay = 0.0, _FIRST_DELAY_S
        self._down_since: float | None = None

    def want(self, numbers: Sequence[int], environment: Mapping[str, str], budget: int) -> None:
        """Plan the requested checks, and use the credentials in `environment` from now on.

        Raises:
            PrefetchRefusedError: The model would need more than `budget` bytes.
        """
        new = self.board.list_new(numbers)
        needed = self.board.wanted_bytes + self.layout.size(new)
        if self.region is not None and new and needed > budget:
            raise PrefetchRefusedError(
                f"the request needs {needed} bytes, but the prefetcher may hold {budget} "
                "(coldstart prefetch stop, then set COLDSTART_PREFETCH_MEMORY_BYTES)"
            )
        self.environment, self.requests = environment, self.requests + 1
        self._renew()
        self.wrong -= Counter(dict.fromkeys(numbers, MAX_WRONG))
        self.board.want(numbers)
        if self.region is not None and new:
            self.region.allocate(self.layout.checks[number] for number in new)

    def note(self, error: str) -> None:
        """Append an error for `status`, unless it repeats the previous one."""
        if not self.errors or self.errors[-1] != error:
            self.errors.append(error)

    def record_arrival(self) -> None:
        """Record that bytes arrived: the source works."""
        self.ended = monotonic()
        self._renew()

    def delay_retry(self, patience_s: float) -> bool:
        """Delay the next attempt after a failed one; return False if the source failed for `patience_s` seconds."""
        now = monotonic()
        if self._down_since is None:
            self._down_since = now
        if now >= self.retry_at:  # count one outage once, although each stream reports it
            self.retry_at, self._delay = now + self._delay, min(2 * self._delay, _LONGEST_DELAY_S)
        return now - self._down_since < patience_s

    def _renew(self) -> None:
        self._down_since, self.retry_at, self._delay = None, 0.0, _FIRST_DELAY_S

    def stats(self) -> dict[str, Any]:
        """Return the wanted, ready, fetched and refetched bytes, the errors, and the times of the first and last byte."""
        return {
            "wanted_bytes": self.board.wanted_bytes,
            "ready_bytes": self.board.ready_bytes,
            "fetched_bytes": self.fetched,
            "refetched": self.refetched,
            "began": self.began,
            "ended": self.ended,
            "errors": list(self.errors),
        }

    def document(self) -> dict[str, Any]:
        """Return the model's entry in `status`."""
        seconds = (self.ended or 0.0) - (self.began or 0.0)
        return {
            "source": redact(self.address),
            "key": self.key,
            "total_bytes": sum(file.size for file in self.layout.files.values()),
            "memory_bytes": 0 if self.region is None else max(self.board.wanted_bytes, self.region.allocated),
            "bytes_per_s": round(self.fetched / seconds) if seconds > 0 else None,
            **self.stats(),
        }
