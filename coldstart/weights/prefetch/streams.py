"""The streams: threads that fetch one unit at a time, verify it, and write it where clients map it.

Nothing reaches the shared memory unverified: bytes land in the stream's own buffer first. Every buffer is reused, so that
its pages are touched for the first time once.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from coldstart.weights.checkpoint import Tensor
from coldstart.weights.prefetch.layout import Layout
from coldstart.weights.prefetch.ranges import Range
from coldstart.weights.prefetch.region import Region
from coldstart.weights.prefetch.schedule import Entry
from coldstart.weights.prefetch.sources import Source, Unavailable, open_source
from coldstart.weights.prefetch.units import Check, Unit, touching

_KEPT_SOURCES = 8
_STEP = 1 << 20


class WrongBytes(Exception):
    """What came is not what the plan says; the message names file, tensor and offset."""


class Origin(Protocol):
    """What a stream must know of a model."""

    key: str
    address: str
    environment: Mapping[str, str]
    layout: Layout
    region: Region | None

    def count(self, file: int, start: int, size: int) -> None:
        """So many bytes of a file have come."""


@dataclass(eq=False)
class Job:
    """One unit on its way: `error` is None when it arrived."""

    model: Origin
    entry: Entry
    generation: int
    error: Exception | None = None


class Streams:
    """`number` threads; `done` is called in one of them with each job that ended."""

    def __init__(self, number: int, done: Callable[[Job], None]) -> None:
        self.number, self.busy = number, 0
        self._done = done
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, job: Job) -> None:
        """Fetch; at most `number` at a time."""
        self.busy += 1
        if len(self._threads) < min(self.busy, self.number):
            thread = threading.Thread(target=self._run, name="stream", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        stream = _Stream()
        while True:
            job = self._jobs.get()
            try:
                stream.fetch(job.model, job.entry.unit)
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not take the stream with it
                job.error = error
            self._done(job)


class _Stream:
    def __init__(self) -> None:
        self._buffer = bytearray()
        self._sources: dict[str, tuple[Mapping[str, str], Source]] = {}

    def fetch(self, model: Origin, unit: Unit) -> None:
        source, buffer, at = self._source(model), self._space(unit.size), 0
        pieces: dict[Range, memoryview] = {}
        for start, end in unit.pieces:
            pieces[start, end] = buffer[at : at + end - start]
            self._fill(model, source, unit.file, start, pieces[start, end])
            at += end - start
        for check in unit.checks:
            _verify(model, source, unit.file, check, pieces)
        if model.region is not None:
            for (start, _), data in pieces.items():
                model.region.write(model.layout.files[unit.file].base + start, data)

    def _fill(self, model: Origin, source: Source, number: int, start: int, into: memoryview) -> None:
        file, filled, idle = model.layout.files[number], 0, 0
        while filled < len(into):
            at = start + filled
            try:
                filled += source.read(file.name, file.size, at, into[filled:], _Counter(model, number, at))
                idle = 0
            except Unavailable:
                # Once more at once: a server may have closed a connection that was kept.
                idle += 1
                if idle > 1:
                    raise

    def _space(self, size: int) -> memoryview:
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        return memoryview(self._buffer)[:size]

    def _source(self, model: Origin) -> Source:
        known = self._sources.get(model.key)
        if known is None or known[0] != model.environment:
            if known is not None:
                known[1].close()
            while len(self._sources) >= _KEPT_SOURCES:
                self._sources.pop(next(iter(self._sources)))[1].close()
            known = (model.environment, open_source(model.address, model.environment))
            self._sources[model.key] = known
        return known[1]


class _Counter:
    """Counts bytes of a file that come one after the other from byte `at` on."""

    def __init__(self, model: Origin, file: int, at: int) -> None:
        self.model, self.file, self.at = model, file, at

    def __call__(self, size: int) -> None:
        self.model.count(self.file, self.at, size)
        self.at += size


def _verify(
    model: Origin, source: Source, number: int, check: Check, pieces: Mapping[Range, memoryview]
) -> None:
    made, at = hashlib.sha256(), check.start
    for (start, end), data in sorted(pieces.items()):
        if start >= check.end or end <= at:
            continue
        _feed(model, source, number, made, (at, start))
        at, stop = max(at, start), min(end, check.end)
        made.update(data[at - start : stop - start])
        at = stop
    _feed(model, source, number, made, (at, check.end))
    if made.hexdigest() != check.digest:
        raise WrongBytes(_blame(model.layout, number, check, pieces))


def _feed(model: Origin, source: Source, number: int, into: hashlib._Hash, span: Range) -> None:
    """Hash bytes that were verified before: out of the region, or out of the file that is mapped in its place."""
    file, (at, end) = model.layout.files[number], span
    buffer = memoryview(bytearray(max(0, min(_STEP, end - at))))
    while at < end:
        part = buffer[: end - at]
        if model.region is not None:
            got = model.region.read(file.base + at, part)
        else:
            got = source.read(file.name, file.size, at, part, lambda _: None)
        into.update(part[:got])
        at += got


def _blame(layout: Layout, number: int, check: Check, pieces: Mapping[Range, memoryview]) -> str:
    file = layout.files[number].name
    if check.tensor:
        return f"{file}: tensor {check.tensor!r} at offset {check.start} has wrong bytes"
    inside: list[Tensor] = []
    crossing: list[Tensor] = []
    for (start, end), data in pieces.items():
        for tensor in touching(layout, number, start, end):
            if tensor.offset < start or tensor.end > end:
                crossing.append(tensor)
            elif (
                hashlib.sha256(data[tensor.offset - start : tensor.end - start]).hexdigest() != tensor.sha256
            ):
                inside.append(tensor)
    place = f"in bytes {check.start} to {check.end}"
    if suspects := inside or crossing:
        named = " or ".join(f"tensor {tensor.name!r} at offset {tensor.offset}" for tensor in suspects)
        return f"{file}: {named} has wrong bytes ({place})"
    return f"{file}: wrong bytes outside of any tensor, at offset {check.start} ({place})"
