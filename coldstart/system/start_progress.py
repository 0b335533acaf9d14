"""Progress of a server start, sent as lines on the pipe on which the server reports readiness.

A line is {"progress": {phase, done, total, unit}}; phases without a counter have no numbers. A process reports only if
it, or a process that forked it, has called `start_reporting`. A spawned process must not report: it inherits the number of
the pipe's descriptor from the environment, but this number may refer to another file there. A report never blocks or
fails a start. A reader that is too slow misses reports.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from coldstart.contract import environment
from coldstart.system import timeline

INTERVAL_S = 0.2
"""Minimum time in seconds between two reports of one counter, except its first and its last one."""
BYTES = "bytes"
KEY = "progress"
_SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(frozen=True, slots=True)
class StartProgress:
    """Progress within one phase of a start.

    `done` and `total` are None for a phase without a counter. `unit` is a plural noun or BYTES.
    """

    phase: str
    done: int | None = None
    total: int | None = None
    unit: str = ""

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> StartProgress:
        """Parse the JSON value of a line. Fields that other versions added are ignored."""
        return cls(*(document.get(name) for name in cls.__slots__))  # type: ignore[arg-type]

    def describe(self) -> str:
        """Return the progress as text, for example "load weights: 1.2 of 3.4 GiB"."""
        if self.done is None or self.total is None:
            return self.phase
        if self.unit != BYTES:
            return f"{self.phase}: {self.done} of {self.total} {self.unit}"
        size, name = next((one for one in _SIZES if self.total >= one[0]), (1, "B"))
        places = 1 if size > 1 else 0
        return f"{self.phase}: {self.done / size:.{places}f} of {self.total / size:.{places}f} {name}"

    def build_document(self) -> dict[str, Any]:
        """Return the progress as JSON data, with its description in the field `text`."""
        return asdict(self) | {"text": self.describe()}


Report = Callable[[StartProgress], object]


class ProgressText(str):
    """Progress line that replaces the previous line of its phase."""

    __slots__ = ()


class LineReader:
    """Reader of JSON lines from a pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._unread = descriptor, b""

    def read(self) -> list[dict[str, Any]] | None:
        """Return the lines that have arrived, or None at the end of the pipe. If the pipe is blocking, wait for data."""
        try:
            chunk = os.read(self._descriptor, 1 << 16)
        except BlockingIOError:
            return []
        if not chunk:
            return None
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        return [json.loads(line) for line in lines]


def ignore_progress(progress: StartProgress) -> None:
    """Ignore a progress report."""


class _ProgressPipe:
    """This process's own open file for the pipe.

    Its descriptor, -1 at first, is never closed, because another thread may be about to write to it.
    """

    descriptor = -1
    is_read = False
    last: StartProgress | None = None


def start_reporting() -> None:
    """Start reporting the progress of this process and its forks to the process that waits for readiness."""
    stop_reporting()
    with suppress(OSError):
        # Writes to this open file never block, while the report of readiness on the pipe may.
        _open_pipe(f"/proc/self/fd/{int(environment.READY_FD.read())}")
        _ProgressPipe.is_read, _ProgressPipe.last = True, None
        timeline.on_begin = lambda name: report(StartProgress(name))


def stop_reporting() -> None:
    """Stop reporting and close this process's end of the pipe, because the reader may be waiting for EOF."""
    is_read, _ProgressPipe.is_read, timeline.on_begin = _ProgressPipe.is_read, False, None
    if is_read:
        with suppress(OSError):
            _open_pipe(os.devnull)


def _open_pipe(path: str) -> None:
    opened = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    if _ProgressPipe.descriptor < 0:
        _ProgressPipe.descriptor = opened
    else:
        os.dup2(opened, _ProgressPipe.descriptor, inheritable=False)
        os.close(opened)


def report(progress: StartProgress) -> None:
    """Report progress on this process's pipe, if `start_reporting` has opened it and the pipe has a reader.

    A repeated report is dropped: a span and a vLLM step inside it may have the same name.
    """
    with suppress(Exception):
        if not _ProgressPipe.is_read or progress == _ProgressPipe.last:
            return
        _ProgressPipe.last = progress
        if not write_progress(_ProgressPipe.descriptor, progress):
            stop_reporting()


def write_progress(descriptor: int, progress: StartProgress) -> bool:
    """Write progress to a non-blocking pipe, or drop it if the pipe is full. Return whether the pipe has a reader."""
    line = (json.dumps({KEY: asdict(progress)}) + "\n").encode()
    try:
        if len(line) <= select.PIPE_BUF:  # a longer line could be written only in part
            os.write(descriptor, line)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return True


class ProgressCounter:
    """Counter that reports the progress of one phase and never raises an error. Without a `total`, it reports nothing."""

    def __init__(self, phase: str, total: int | None, unit: str) -> None:
        self.phase, self.total, self.unit = phase, total, unit
        self._due = 0.0

    def report_done(self, done: int) -> None:
        """Report that `done` of the total are done, at most once every INTERVAL_S seconds until all are done."""
        if not _ProgressPipe.is_read or not self.total:
            return
        now = time.monotonic()
        if now >= self._due or done >= self.total:
            self._due = now + INTERVAL_S
            report(StartProgress(self.phase, done, self.total, self.unit))
