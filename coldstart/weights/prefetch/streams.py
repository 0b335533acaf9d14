"""Fetch of consecutive checks by a thread: it reads their bytes, verifies them and writes them to the shared memory.

Unverified bytes stay in the thread's own buffer and never reach the shared memory. A buffer is reused, so that its
pages are touched for the first time once.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coldstart.weights.prefetch.http_source import open_http
from coldstart.weights.prefetch.layout import Check, RegionFile
from coldstart.weights.prefetch.model import PrefetchedModel
from coldstart.weights.prefetch.paces import FetchPace
from coldstart.weights.prefetch.sources import (
    LocalSource,
    ObjectSource,
    RangeSource,
    SourceTooSlowError,
    SourceUnavailableError,
    is_local,
)

MAX_READS = 64
"""Maximum number of requests for one run of checks."""


def open_source(address: str, environment: Mapping[str, str]) -> RangeSource:
    """Open a source for one stream; `environment` has the client's credentials. Raises SourceUnusableError."""
    if address.startswith("s3://"):
        return ObjectSource(address, environment)
    return LocalSource(Path(address)) if is_local(address) else open_http(address, environment)


class WrongBytesError(Exception):
    """Fetched bytes of the check `number` do not match the plan; the message names the file, and the tensor or the bytes."""

    def __init__(self, number: int, check: Check) -> None:
        what = f"there are wrong bytes in bytes {check.start} to {check.end}"
        if check.tensor is not None:
            what = f"tensor {check.tensor.name!r} at offset {check.tensor.offset} has wrong bytes"
        super().__init__(f"{check.file.name}: {what}")
        self.number = number


class NoMemoryError(RuntimeError):
    """The machine has too little memory for the fetched bytes; the source works."""


@dataclass(eq=False)
class FetchJob:
    """Fetch of the checks `run`, which follow each other in one file; `error` is None after a successful fetch.

    `request` is the number of the model's requests before it, and `received` the number of received bytes.
    """

    model: PrefetchedModel
    run: range
    request: int
    pace: FetchPace | None = None
    received: int = 0
    error: Exception | None = None

    def count(self, size: int) -> None:
        """Count `size` received bytes, and wait for the rate limit."""
        self.received += size
        if self.pace is not None:
            self.pace.take(size)


class _Stream(threading.local):
    """Buffer and open source of one thread."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._source: tuple[Mapping[str, str], RangeSource] | None = None

    def space(self, size: int) -> memoryview:
        """Return `size` bytes of the buffer."""
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        return memoryview(self._buffer)[:size]

    def open(self, model: PrefetchedModel) -> RangeSource:
        """Return the source of the model with its present credentials."""
        if self._source is None or self._source[0] != model.environment:
            if self._source is not None:
                self._source[1].close()
            self._source = (model.environment, open_source(model.address, model.environment))
        return self._source[1]


_stream = _Stream()


def fetch(job: FetchJob) -> None:
    """Fetch, verify and write the bytes of a job; its `error` has the reason of a failure."""
    try:
        _fetch(job)
    except Exception as error:  # noqa: BLE001 - the main thread decides about every error
        job.error = error


def _fetch(job: FetchJob) -> None:
    model, checks = job.model, job.model.layout.checks[job.run.start : job.run.stop]
    file, start = checks[0].file, checks[0].start
    data = _stream.space(checks[-1].end - start)
    _fill(job, file, start, data)
    for number, check in zip(job.run, checks, strict=True):
        if hashlib.sha256(data[check.start - start : check.end - start]).hexdigest() != check.digest:
            raise WrongBytesError(number, check)
    if model.region is not None:
        try:
            model.region.write(file.base + start, data)
        except OSError as error:
            raise NoMemoryError(f"no memory for {file.name} at {start}: {error.strerror}") from error


def _fill(job: FetchJob, file: RegionFile, start: int, buffer: memoryview) -> None:
    source, filled, reads, idle = _stream.open(job.model), 0, 0, 0
    while filled < len(buffer):
        # Each connection may end after a byte, which its own limit of time does not notice.
        if (reads := reads + 1) > MAX_READS:
            raise SourceTooSlowError(
                f"{file.name} arrives too slowly: {filled} bytes in {MAX_READS} requests"
            )
        try:
            filled += source.read(file.name, file.size, start + filled, buffer[filled:], job.count)
            idle = 0
        except SourceTooSlowError:
            raise
        except SourceUnavailableError:
            # Retry once at once: the server may have closed a reused connection.
            idle += 1
            if idle > 1:
                raise
