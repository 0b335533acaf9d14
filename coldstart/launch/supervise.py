"""Stay with a server that was started: end it on an error, pass signals on, remove what it leaves behind."""

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
    """End the server if the block is left by an exception (Ctrl-C included)."""
    try:
        yield
    except BaseException:
        if process.poll() is None:
            process.signal(signal.SIGTERM)
            process.wait()
        _sweep(process)
        raise


def stay(process: ServerProcess) -> int:
    """Live as long as the server, passing SIGINT and SIGTERM on; the exit code that this process should end with.

    130 or 143 when a signal ended it; 1 when it ended by itself, whatever it said: a server is not expected to.
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
    process.wait()
    _sweep(process)
    return 128 + caught[0] if caught else 1


@contextmanager
def _woken() -> Iterator[int]:
    """A descriptor that is readable after a signal: one that comes just before a wait begins would not end it."""
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
        resident = Path(f"/proc/{process.pid}").exists()  # an engine that sleeps again keeps its own
        scratch.sweep(None if resident else process.pid)  # where it was killed it has left its directory
