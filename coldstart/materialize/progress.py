"""Report progress of a materialization stage: its expected duration, and the steps that its process has finished."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from coldstart.system.start_progress import KEY, LineReader, ProgressText, StartProgress
from coldstart.system.timeline import Timeline

Steps = Callable[[str], None]
_POLL_S = 0.5


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


def wait(
    process: subprocess.Popen[bytes], events: Path, track: str, say: Steps, pipe: LineReader | None = None
) -> int:
    """Wait for `process` and return its exit code.

    Report each span of `track` that appears in `events`, with its seconds, and the latest progress on `pipe`.
    """
    said = 0
    while True:
        try:
            code: int | None = process.wait(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            code = None
        if progress := [line[KEY] for line in (pipe and pipe.read()) or () if KEY in line]:
            say(ProgressText(StartProgress.parse(progress[-1]).describe()))
        spans = []
        with suppress(OSError, ValueError):  # not created yet, or a line is incomplete
            spans = [span for span in Timeline.read(events).spans if span.track == track]
        for span in spans[said:]:
            say(f"{span.name}: {span.duration_s:.1f} s")
        said = max(said, len(spans))
        if code is not None:
            return code
