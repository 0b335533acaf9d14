"""Supervise a started server: end it on an error, forward signals, and remove its temporary files."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from coldstart.errors import UsageError
from coldstart.launch.server_process import ServerProcess
from coldstart.system.proc import scratch


@contextmanager
def end_on_error(process: ServerProcess) -> Iterator[None]:
    """End the server if the block raises, Ctrl-C included."""
    try:
        yield
    except BaseException:
        end(process)
        raise


def end(process: ServerProcess, patience_s: float | None = None) -> int:
    """End the server: SIGTERM, then SIGKILL after `patience_s` seconds (None: no limit). Return its exit code."""
    if not has_ended(process, 0.0):
        process.signal(signal.SIGTERM)
        if not has_ended(process, patience_s):
            process.signal(signal.SIGKILL)
    return reap(process)


def stay(process: ServerProcess) -> int:
    """Wait until the server exits, forward SIGINT and SIGTERM, and return the exit code for this process.

    The code is 130 or 143 after a signal. It is 1 if the server exits by itself with any code: a server should keep running.
    """
    caught: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        caught.append(number)
        process.signal(signal.SIGTERM if len(caught) == 1 else signal.SIGKILL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    with _woken() as reader:
        ended, watched = process.fileno(), [process.fileno(), reader]
        while ended not in select.select(watched, [], [])[0]:
            with suppress(BlockingIOError):
                os.read(reader, 512)
    reap(process)
    return 128 + caught[0] if caught else 1


def has_ended(process: ServerProcess, timeout_s: float | None) -> bool:
    """Return whether the server ends within `timeout_s` seconds (None: no limit)."""
    return bool(select.select([process.fileno()], [], [], timeout_s)[0])


def reap(process: ServerProcess) -> int:
    """Wait until the server has ended, remove what it leaves behind, and return its exit code."""
    code = process.wait()
    _sweep(process)
    return code


@contextmanager
def _woken() -> Iterator[int]:
    """Yield a descriptor that becomes readable after a signal, including one that arrives just before a wait begins."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


def _sweep(process: ServerProcess) -> None:
    with suppress(OSError, UsageError):
        resident = Path(
            f"/proc/{process.pid}"
        ).exists()  # an engine that went back to sleep keeps its directory
        scratch.sweep(None if resident else process.pid)  # a killed server leaves its directory
