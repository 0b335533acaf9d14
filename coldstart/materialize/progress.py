"""Report progress of a materialization stage: its expected duration, and what its process does."""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from coldstart.system.start_progress import KEY, LineReader, ProgressText, StartProgress

Steps = Callable[[str], None]


class Phase(Protocol):
    """Shows that a stage runs, with its expected duration in seconds if known, and yields a function that reports steps."""

    def __call__(self, name: str, expected_s: float | None = None, /) -> AbstractContextManager[Steps]: ...


def silent(step: str) -> None:
    """Report no steps."""


@contextmanager
def no_progress(name: str, expected_s: float | None = None) -> Iterator[Steps]:
    """A `Phase` that reports nothing."""
    del name, expected_s
    yield silent


def wait(process: subprocess.Popen[bytes], pipe: int, say: Steps) -> int:
    """Wait for `process`, report the progress that it writes to `pipe`, and return its exit code."""
    lines, ended = LineReader(pipe), os.pidfd_open(process.pid)
    watched = [pipe, ended]
    try:
        while ended not in select.select(watched, [], [])[0]:
            if (messages := lines.read()) is None:
                watched = [ended]
            for message in messages or ():
                if KEY in message:
                    say(ProgressText(StartProgress.parse(message[KEY]).describe()))
    finally:
        os.close(ended)
    return process.wait()
