"""Fetch of the weights of one source and plan: the streams that serve all leases, and the memory that they fill.

Each stream is a thread: it takes the next run of checks (byte ranges with digests), reads and verifies its bytes, writes
them to the shared memory and records the result. Unverified bytes stay in the thread's own buffer.

Invariant: leases never request more bytes than the memory budget. A request that does not fit is rejected as a whole.
"""

from __future__ import annotations

import hashlib
import mmap
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread
from time import monotonic
from typing import Any

import msgspec

from coldstart.contract.weights import LimitedFetch
from coldstart.weights.prefetch import PrefetchRefusedError, layout
from coldstart.weights.prefetch.http_source import open_http_source
from coldstart.weights.prefetch.layout import DigestedRange, RegionFile, SharedRegion
from coldstart.weights.prefetch.rate_limits import FetchRateLimiter
from coldstart.weights.prefetch.schedule import CheckState, FetchSchedule, Lease
from coldstart.weights.prefetch.sources import (
    LocalSource,
    ObjectSource,
    RangeSource,
    SourceTooSlowError,
    SourceUnavailableError,
    SourceUnusableError,
    compute_weights_key,
    is_local,
    redact_address,
)

MAX_WRONG = 3
MAX_READS = 64
"""Maximum number of requests for one run of checks."""
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 2.0
_ERRORS_KEPT = 20


class WrongBytesError(Exception):
    """Error for bytes that do not match the digest of check `number`. The message names the file and the tensor or bytes."""

    def __init__(self, number: int, check: DigestedRange) -> None:
        what = f"bytes {check.start} to {check.end} do not match their digest"
        if check.tensor is not None:
            what = f"tensor {check.tensor.name!r} at offset {check.tensor.offset} does not match its digest"
        super().__init__(f"{check.file.name}: {what}")
        self.number = number


class NoMemoryError(RuntimeError):
    """Error for a machine with too little memory for the fetched bytes. The source itself works."""


def open_source(address: str, environment: Mapping[str, str]) -> RangeSource:
    """Open a source for one stream. `environment` contains the client's credentials. Raises SourceUnusableError."""
    if address.startswith("s3://"):
        return ObjectSource(address, environment)
    return LocalSource(Path(address)) if is_local(address) else open_http_source(address, environment)


@dataclass(eq=False)
class _Job:
    """Fetch of the checks `run`, which are consecutive in one file. Clients had made `request` requests when it began."""

    run: range
    limiter: FetchRateLimiter
    environment: Mapping[str, str]
    request: int
    received: int = 0

    def count(self, size: int) -> None:
        """Count `size` received bytes, and wait for the rate limit."""
        self.received += size
        self.limiter.consume_and_wait(size)


class Fetcher:
    """Fetch of the weights of a plan. `region` is None for a local directory, whose shared copy is in the page cache.

    `changed` is the condition that protects this state and is notified of each change. Callers of the methods must hold
    it.
    """

    def __init__(
        self, address: str, plan: bytes, changed: Condition, *, streams: int, budget: int, patience_s: float
    ) -> None:
        """Read the plan. No byte is fetched and no memory is allocated before the first lease.

        Args:
            address: Normalized source.
            plan: Weights plan as JSON.
            changed: Condition that protects the state.
            streams: Number of parallel streams for the fetches of one limiter, so that a slow fetch does not delay others.
            budget: Maximum number of bytes that all leases may request.
            patience_s: Time in seconds for which a source that does not respond is retried.

        Raises:
            PrefetchRefusedError: The plan is invalid, or the kernel has no shared memory for it.
        """
        try:
            self.layout = layout.build_layout(msgspec.json.decode(plan, type=dict[str, Any]))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise PrefetchRefusedError(f"cannot parse the weights plan: {error}") from error
        self.address, self.key, self.changed = address, compute_weights_key(address, plan), changed
        try:
            self.region = None if is_local(address) else SharedRegion(self.layout.total_bytes)
        except OSError as error:
            raise PrefetchRefusedError(
                f"cannot create shared memory of {self.layout.total_bytes} bytes: {error.strerror}"
            ) from error
        self.streams, self.budget, self._patience_s = streams, budget, patience_s
        self.board, self.leases = FetchSchedule(self.layout), dict[Lease, FetchRateLimiter]()
        self._early, self._is_taken = set[Lease](), False
        self.waiting = 0
        self._environment: Mapping[str, str] = {}
        self._requests, self._wrong = 0, Counter[int]()
        self._began: float | None = None
        self._ended: float | None = None
        self._errors: deque[str] = deque(maxlen=_ERRORS_KEPT)
        self._fetched = self._refetched = 0
        self._expect_answer()

    def create_lease(
        self,
        names: Sequence[str] | None,
        limiter: FetchRateLimiter,
        environment: Mapping[str, str],
        *,
        limits: LimitedFetch | None = None,
        early: bool = False,
    ) -> Lease:
        """Request the tensors `names` (None: all files) and return the lease.

        Use the credentials in `environment` from now on. An `early` lease ends by itself when its bytes are fetched and
        another client has a lease.

        Raises:
            PrefetchRefusedError: The plan lacks a tensor, or all leases would need more than the memory budget.
        """
        wanted = self.layout.select_checks(names)
        missing = (CheckState.UNWANTED, CheckState.FREED)
        new = [number for state in missing for number in self.board.list_checks(state, wanted)]
        needed = self.board.wanted_bytes + self.layout.count_bytes(new)
        if self.region is not None and new and needed > self.budget:
            raise PrefetchRefusedError(
                f"the request needs {needed} bytes, but the prefetcher is limited to {self.budget} bytes "
                "(to raise the limit, run `coldstart prefetch stop` and set COLDSTART_PREFETCH_MEMORY_BYTES)"
            )
        self._environment, self._requests = environment, self._requests + 1
        self._expect_answer()
        self._wrong -= Counter(dict.fromkeys(wanted, MAX_WRONG))
        self.board.request_checks(wanted)
        limits = limits or LimitedFetch("")
        if self.region is not None and new and not limits.frees_loaded:
            self.region.start_allocation(self.layout.checks[number] for number in new)
        lease = Lease(wanted, background=limits.background, most_held_bytes=limits.most_held_bytes)
        self.leases[lease] = limiter
        self._early |= {lease} if early else set()
        self._is_taken |= not early
        self._end_early()
        while limiter.streams < self.streams and self.board.is_unfinished(lease):
            limiter.streams += 1
            Thread(target=self._stream, args=(limiter,), name="stream", daemon=True).start()
        self.changed.notify_all()
        return lease

    def release_lease(self, lease: Lease) -> None:
        """End a lease. Its bytes remain in memory."""
        if (limiter := self.leases.pop(lease, None)) is not None:
            limiter.served |= not self.board.is_unfinished(lease)
        self._early.discard(lease)
        self.changed.notify_all()

    def free_tensor(self, lease: Lease, name: str) -> None:
        """Free the memory of a tensor that the lease's client has loaded, unless another client may still read it."""
        readers = self.leases.keys() - self._early - {lease}
        run = self.layout.tensors.get(name, range(0))
        is_ready = len(self.board.list_checks(CheckState.READY, run)) == len(run)
        if self.region is None or readers or not run or not is_ready:
            return
        self.board.set_state(run, CheckState.FREED)
        file, start = self.layout.checks[run.start].file, self.layout.checks[run.start].start
        end = self.layout.checks[run.stop - 1].end
        first, stop = start - start % mmap.PAGESIZE, end + -end % mmap.PAGESIZE
        # Neighbours that are still needed may have bytes on the first and the last page.
        first += 0 if self._is_freed(file, first, start) else mmap.PAGESIZE
        stop -= 0 if self._is_freed(file, end, min(stop, file.size)) else mmap.PAGESIZE
        self.region.free(file.region_offset + first, file.region_offset + stop)
        self.changed.notify_all()

    def _is_freed(self, file: RegionFile, start: int, end: int) -> bool:
        numbers = self.layout.find_covering_checks(file.name, start, end - start)
        return len(self.board.list_checks(CheckState.FREED, numbers)) == len(numbers)

    def has_fetch_ended(self, limiter: FetchRateLimiter) -> bool:
        """Return whether a lease of this limiter has received all requested bytes, and none waits for more."""
        waits = [self.board.is_unfinished(lease) for lease, own in self.leases.items() if own is limiter]
        return not any(waits) and (bool(waits) or limiter.served)

    def document(self) -> dict[str, Any]:
        """Return the source, byte counts, errors, and times of the first and last byte (CLOCK_MONOTONIC, in s) as JSON data."""
        seconds, wanted = (self._ended or 0.0) - (self._began or 0.0), self.board.wanted_bytes
        return {
            "source": redact_address(self.address),
            "key": self.key,
            "streams": self.streams,
            "leases": len(self.leases),
            "budget_bytes": self.budget,
            "total_bytes": sum(file.size for file in self.layout.files.values()),
            "memory_bytes": 0 if self.region is None else max(wanted, self.region.allocated_bytes),
            "bytes_per_s": round(self._fetched / seconds) if seconds > 0 else None,
            "wanted_bytes": wanted,
            "ready_bytes": self.board.ready_bytes,
            "fetched_bytes": self._fetched,
            "refetched": self._refetched,
            "began": self._began,
            "ended": self._ended,
            "errors": list(self._errors),
        }

    def record_error(self, error: str) -> None:
        """Add an error to those that `document` returns, unless it repeats the previous error."""
        if not self._errors or self._errors[-1] != error:
            self._errors.append(error)

    def _end_early(self) -> None:
        for lease in [*self._early] if self._is_taken else ():
            if not self.board.is_unfinished(lease):
                self.release_lease(lease)

    # Streams. These three are called without the lock.

    def _stream(self, limiter: FetchRateLimiter) -> None:
        """Fetch until no lease of this limiter waits for bytes."""
        # Unlike malloc, this returns the memory to the system at the end.
        space = memoryview(mmap.mmap(-1, min(self.layout.chunk, self.layout.total_bytes), mmap.MAP_PRIVATE))
        source: RangeSource | None = None
        opened: Mapping[str, str] | None = None
        while (job := self._take(limiter)) is not None:
            failure: Exception | None = None
            try:
                if source is not None and opened != job.environment:
                    source.close()
                    source = None
                if source is None:
                    source, opened = open_source(self.address, job.environment), job.environment
                self._fetch(job, source, space)
            except Exception as error:  # noqa: BLE001 - `_settle` decides about every error
                failure = error
            with self.changed:
                self._settle(job, failure)
                self._end_early()
                self.changed.notify_all()
        if source is not None:
            source.close()

    def _take(self, limiter: FetchRateLimiter) -> _Job | None:
        """Wait for a run of checks to fetch, and return it, or None if no lease of this limiter waits for bytes."""
        with self.changed:
            while any(own is limiter and self.board.is_unfinished(one) for one, own in self.leases.items()):
                delay_s = self._retry_at - monotonic()
                run = None
                if delay_s <= 0:
                    run = self.board.pick_run(self.leases, lambda one: self._may_fetch(one, limiter))
                if run is not None:
                    self.board.set_state(run, CheckState.BUSY)
                    self._began = self._began or monotonic()
                    return _Job(run, limiter, self._environment, self._requests)
                self.changed.wait(delay_s if delay_s > 0 else None)
            limiter.streams -= 1
            return None

    def _may_fetch(self, lease: Lease, limiter: FetchRateLimiter) -> bool:
        return self.leases[lease] is limiter and (self.waiting > 0 or self.board.may_fetch(lease))

    def _fetch(self, job: _Job, source: RangeSource, space: memoryview) -> None:
        checks = self.layout.checks[job.run.start : job.run.stop]
        file, start = checks[0].file, checks[0].start
        data = space[: checks[-1].end - start]
        filled = reads = idle = 0
        while filled < len(data):
            # Each connection may end after one byte, which its own time limit does not detect.
            if (reads := reads + 1) > MAX_READS:
                raise SourceTooSlowError(
                    f"the source sends {file.name} too slowly: {filled} bytes in {MAX_READS} requests"
                )
            try:
                filled += source.read(file.name, file.size, start + filled, data[filled:], job.count)
                idle = 0
            except SourceUnavailableError as error:
                # Retry once immediately, because the server may have closed a reused connection.
                idle += 1
                if idle > 1 or isinstance(error, SourceTooSlowError):
                    raise
        for number, check in zip(job.run, checks, strict=True):
            if hashlib.sha256(data[check.start - start : check.end - start]).hexdigest() != check.digest:
                raise WrongBytesError(number, check)
        if self.region is not None:
            try:
                self.region.write(file.region_offset + start, data)
            except OSError as error:
                raise NoMemoryError(
                    f"cannot allocate memory for {file.name} at byte {start}: {error.strerror}"
                ) from error

    # Results of jobs.

    def _settle(self, job: _Job, error: Exception | None) -> None:
        self._fetched += job.received
        if error is None:
            self.board.set_state(job.run, CheckState.READY)
            self._ended = monotonic()
            self._expect_answer()
            return
        self.board.set_state(job.run, CheckState.IDLE)
        self._refetched += job.received
        if job.request != self._requests:
            return  # a client has attached since, perhaps with other credentials
        if isinstance(error, SourceUnavailableError) and self._delay_retry():
            self.record_error(str(error))
        elif isinstance(error, WrongBytesError):
            self._wrong[error.number] += 1
            if self._wrong[error.number] < MAX_WRONG:
                self.record_error(f"{error}; these bytes are fetched again")
            else:
                self._fail(
                    [error.number], f"{error}, after {MAX_WRONG} fetches from {redact_address(self.address)}"
                )
        elif isinstance(error, NoMemoryError):
            self._fail(self.board.list_checks(CheckState.IDLE), str(error))
        else:
            numbers: Iterable[int] = job.run
            if isinstance(error, SourceUnavailableError):
                numbers = self.board.list_checks(CheckState.IDLE)
            elif isinstance(error, SourceUnusableError | OSError):
                numbers = self.board.list_checks(
                    CheckState.IDLE, self.layout.checks[job.run.start].file.range_numbers
                )
            self._fail(numbers, f"{redact_address(self.address)}: {error}")

    def _fail(self, numbers: Iterable[int], reason: str) -> None:
        self.record_error(reason)
        self.board.set_state(numbers, CheckState.FAILED, reason)

    def _expect_answer(self) -> None:
        """Reset the retry time of the source, because the source works again or has new credentials."""
        self._down_since: float | None = None
        self._retry_at, self._delay_s = 0.0, _FIRST_DELAY_S

    def _delay_retry(self) -> bool:
        """Wait before the next attempt after a failed one. Return False if the source has failed for `patience_s` seconds."""
        now = monotonic()
        self._down_since = now if self._down_since is None else self._down_since
        if now >= self._retry_at:  # count an outage only once, although each stream reports it
            self._retry_at = now + self._delay_s
            self._delay_s = min(2 * self._delay_s, _LONGEST_DELAY_S)
        return now - self._down_since < self._patience_s
