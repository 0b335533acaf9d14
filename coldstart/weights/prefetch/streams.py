"""Streams: threads that fetch one unit at a time, verify it and write it to the shared memory.

Unverified bytes stay in the stream's own buffer and never reach the shared memory. Buffers are reused, so
that their pages are touched for the first time once.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic

from coldstart.artifacts.net import http_client
from coldstart.weights.prefetch.backends import open_source
from coldstart.weights.prefetch.byte_ranges import Range
from coldstart.weights.prefetch.model import PrefetchedModel
from coldstart.weights.prefetch.paces import FetchPace
from coldstart.weights.prefetch.range_source import (
    RangeSource,
    SourceTooSlowError,
    SourceUnavailableError,
)
from coldstart.weights.prefetch.region import SharedRegion
from coldstart.weights.prefetch.region_layout import Check, RegionFile
from coldstart.weights.prefetch.schedule import Unit, UnitEntry

_BOUNDS = http_client.read_bounds()


class WrongBytesError(Exception):
    """Fetched bytes do not match the plan; the message names the file and the tensor, or the range of bytes."""


@dataclass(eq=False)
class FetchJob:
    """Fetch of one unit; `error` is None after a successful fetch.

    `received` is the number of received bytes, `paused_s` the time in seconds that the job waited for its rate limit.
    """

    model: PrefetchedModel
    entry: UnitEntry
    generation: int
    pace: FetchPace | None = None
    paused_s: float = 0.0
    received: int = 0
    error: Exception | None = None

    def count(self, size: int) -> None:
        """Count `size` received bytes, and wait for the rate limit."""
        self.received += size
        if self.pace is not None:
            self.paused_s += self.pace.take(size)


class Streams:
    """Threads that run jobs, one each; a thread calls `done` when its job has ended.

    The caller of `submit` limits the number of jobs. `number` threads are retained for later jobs, with their
    buffers and connections.
    """

    def __init__(self, number: int, done: Callable[[FetchJob], None]) -> None:
        self.number = number
        self.jobs: set[FetchJob] = set()
        self._done = done
        self._jobs: SimpleQueue[FetchJob] = SimpleQueue()
        self._threads = 0
        self._lock = threading.Lock()

    def submit(self, job: FetchJob) -> None:
        """Run a job in a thread."""
        self.jobs.add(job)
        with self._lock:
            self._jobs.put(job)
            if self._threads < len(self.jobs):
                self._threads += 1
                threading.Thread(target=self._run, name="stream", daemon=True).start()

    def _run(self) -> None:
        stream = _Stream()
        while True:
            job = self._jobs.get()
            try:
                stream.fetch(job, job.entry.unit)
            except Exception as error:  # noqa: BLE001 - no error may end the stream's thread
                job.error = error
            self._done(job)
            with self._lock:
                if self._threads > self.number and self._jobs.empty():
                    self._threads -= 1
                    break
        stream.close()


class _Stream:
    def __init__(self) -> None:
        self._buffer = bytearray()
        self._source: tuple[Mapping[str, str], RangeSource] | None = None

    def close(self) -> None:
        if self._source is not None:
            self._source[1].close()
            self._source = None

    def fetch(self, job: FetchJob, unit: Unit) -> None:
        model = job.model
        source, buffer, at = self._open(model), self._space(unit.size), 0
        pieces: dict[Range, memoryview] = {}
        for start, end in unit.pieces:
            pieces[start, end] = buffer[at : at + end - start]
            self._fill(job, source, start, pieces[start, end])
            at += end - start
        file = model.layout.files[unit.file]
        for check in unit.checks:
            _verify(file, check, pieces)
        if model.region is not None:
            for (start, _), data in pieces.items():
                _keep(model.region, file, start, data)

    def _fill(self, job: FetchJob, source: RangeSource, start: int, buffer: memoryview) -> None:
        number = job.entry.unit.file
        file, filled, idle, began = job.model.layout.files[number], 0, 0, monotonic() - job.paused_s
        while filled < len(buffer):
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
            took_s = monotonic() - began - job.paused_s
            if took_s > _BOUNDS.window_s + filled / _BOUNDS.floor:
                raise SourceTooSlowError(f"{file.name} arrives too slowly: {filled} bytes in {took_s:.0f} s")

    def _space(self, size: int) -> memoryview:
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        return memoryview(self._buffer)[:size]

    def _open(self, model: PrefetchedModel) -> RangeSource:
        if self._source is None or self._source[0] != model.environment:
            self.close()
            self._source = (model.environment, open_source(model.address, model.environment))
        return self._source[1]


def _verify(file: RegionFile, check: Check, pieces: Mapping[Range, memoryview]) -> None:
    first, data = next((start, data) for (start, end), data in pieces.items() if start <= check.start < end)
    if hashlib.sha256(data[check.start - first : check.end - first]).hexdigest() != check.digest:
        if check.tensor is None:
            raise WrongBytesError(f"{file.name}: there are wrong bytes in bytes {check.start} to {check.end}")
        place = f"tensor {check.tensor.name!r} at offset {check.tensor.offset}"
        raise WrongBytesError(f"{file.name}: {place} has wrong bytes")


class NoMemoryError(RuntimeError):
    """The machine has too little memory for the fetched bytes; the source works."""


def _keep(region: SharedRegion, file: RegionFile, start: int, data: memoryview) -> None:
    try:
        region.write(file.base + start, data)
    except OSError as error:
        raise NoMemoryError(f"no memory for {file.name} at {start}: {error.strerror}") from error
