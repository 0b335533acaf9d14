"""Progress of a start: its phase with figures, as lines on the pipe on which the server reports readiness.

A line is {"progress": {phase, done, total, unit}}; only a phase with a counter has figures. A process reports if it, or a
process that forked it, has called `begin`: in a spawned process the descriptor belongs to another file.
Invariant: a report never blocks or fails a start. A reader that does not keep up misses reports.
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
"""Shortest time in seconds between two figures of one phase, besides its first and its last one."""
BYTES = "bytes"
KEY = "progress"
_SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass(frozen=True, slots=True)
class StartProgress:
    """Progress within one phase of a start.

    `done` and `total` are None for a phase without a counter; `unit` is a plural noun or BYTES.
    """

    phase: str
    done: int | None = None
    total: int | None = None
    unit: str = ""

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> StartProgress:
        """Parse the value of a line. Fields of other versions are ignored."""
        return cls(*(document.get(name) for name in cls.__slots__))  # type: ignore[arg-type]

    def describe(self) -> str:
        """Return the progress in words, for example "load weights: 1.2 of 3.4 GiB"."""
        if self.done is None or self.total is None:
            return self.phase
        if self.unit != BYTES:
            return f"{self.phase}: {self.done} of {self.total} {self.unit}"
        size, name = next((one for one in _SIZES if self.total >= one[0]), (1, "B"))
        places = 1 if size > 1 else 0
        return f"{self.phase}: {self.done / size:.{places}f} of {self.total / size:.{places}f} {name}"

    def build_document(self) -> dict[str, Any]:
        """Return the progress as JSON data, with its words as `text`."""
        return asdict(self) | {"text": self.describe()}


Report = Callable[[StartProgress], object]


class ProgressText(str):
    """Progress in words, as the step of a phase that the next step replaces."""

    __slots__ = ()


class LineReader:
    """Reads the lines of JSON on a pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._unread = descriptor, b""

    def read(self) -> list[dict[str, Any]] | None:
        """Return the lines that have arrived, None at the end of the pipe. Block only if the pipe blocks."""
        try:
            chunk = os.read(self._descriptor, 1 << 16)
        except BlockingIOError:
            return []
        if not chunk:
            return None
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        return [json.loads(line) for line in lines]


def ignore(progress: StartProgress) -> None:
    """Report nothing."""


class _Pipe:
    """This process's own open file of the pipe.

    Its number, -1 before the first, is never closed, because another thread may be about to write to it.
    """

    descriptor = -1
    is_read = False
    last: StartProgress | None = None


def begin() -> None:
    """Report the progress of this process, and of those that it forks, to the process that awaits its readiness."""
    end()
    with suppress(OSError):
        # Writes to this open file never block, while the report of readiness on the pipe may.
        _open(f"/proc/self/fd/{int(environment.READY_FD.read())}")
        _Pipe.is_read, _Pipe.last = True, None
        timeline.on_begin = lambda name: report(StartProgress(name))


def end() -> None:
    """Report nothing from now on, and release the pipe, whose end the reader may wait for."""
    is_read, _Pipe.is_read, timeline.on_begin = _Pipe.is_read, False, None
    if is_read:
        with suppress(OSError):
            _open(os.devnull)


def _open(path: str) -> None:
    opened = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    if _Pipe.descriptor < 0:
        _Pipe.descriptor = opened
    else:
        os.dup2(opened, _Pipe.descriptor, inheritable=False)
        os.close(opened)


def report(progress: StartProgress) -> None:
    """Report the progress on this process's pipe, if `begin` found one, until nothing reads it.

    A repeated report is dropped: a span and a step of vLLM inside it may have one name.
    """
    with suppress(Exception):
        if not _Pipe.is_read or progress == _Pipe.last:
            return
        _Pipe.last = progress
        if not write(_Pipe.descriptor, progress):
            end()


def write(descriptor: int, progress: StartProgress) -> bool:
    """Write the progress to a pipe that does not block, unless it is full. Return whether the pipe has a reader."""
    line = (json.dumps({KEY: asdict(progress)}) + "\n").encode()
    try:
        if len(line) <= select.PIPE_BUF:  # a longer line could be written in part
            os.write(descriptor, line)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return True


class Counter:
    """Reports the figures of one phase, without an error whatever they are. A total of None: the phase has none."""

    def __init__(self, phase: str, total: int | None, unit: str) -> None:
        self.phase, self.total, self.unit = phase, total, unit
        self._due = 0.0

    def show(self, done: int) -> None:
        """Report that `done` of the total are done: the first and the last figure, and others after INTERVAL_S."""
        if not _Pipe.is_read or not self.total:
            return
        now = time.monotonic()
        if now >= self._due or done >= self.total:
            self._due = now + INTERVAL_S
            report(StartProgress(self.phase, done, self.total, self.unit))
