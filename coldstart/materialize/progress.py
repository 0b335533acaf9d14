"""What is said while a stage of a materialization goes on: how long it may take, and the steps that its process has ended."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Protocol

from coldstart.system.timeline import Timeline

Steps = Callable[[str], None]
_POLL_S = 0.5


class Phase(Protocol):
    """Shows that the stage `name` goes on, and for how many seconds it may, where that is known; takes its steps."""

    def __call__(self, name: str, expected_s: float | None = None, /) -> AbstractContextManager[Steps]: ...


def silent(step: str) -> None:
    """For whoever shows no steps."""


def wait(process: subprocess.Popen[bytes], events: Path, track: str, say: Steps) -> int:
    """Wait for `process`; its exit code. Each span of `track` that appears in `events` meanwhile is said, with its seconds."""
    said = 0
    while True:
        try:
            code: int | None = process.wait(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            code = None
        spans = []
        with suppress(OSError, ValueError):  # not begun, or in the middle of a line
            spans = [span for span in Timeline.read(events).spans if span.track == track]
        for span in spans[said:]:
            say(f"{span.name}: {span.duration_s:.1f} s")
        said = max(said, len(spans))
        if code is not None:
            return code
