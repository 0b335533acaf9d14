"""Recording one start's timeline: every process of it appends to one events file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coldstart.timeline import EVENTS_VARIABLE, Timeline, emit, now


class Recording:
    """The timeline of the start, empty until the recorded block has ended."""

    def __init__(self) -> None:
        self.timeline = Timeline()


@contextmanager
def recording(save_to: Path | None, *, wanted: bool) -> Iterator[Recording]:
    """Record what is started in the block; written to `save_to` as Chrome trace-event JSON when it is named.

    Records when `wanted`, when there is a file to save to, or when somebody outside has named the events file; that one is kept.
    Raises OSError when the file cannot be written.
    """
    made = Recording()
    outside = os.environ.get(EVENTS_VARIABLE)
    if outside is None and not wanted and save_to is None:
        yield made
        return
    with tempfile.TemporaryDirectory(prefix="coldstart-") as directory:
        events = outside or str(Path(directory) / "events")
        os.environ[EVENTS_VARIABLE] = events
        emit("coldstart", process_started(), now(), track="command")
        try:
            yield made
        finally:
            if outside is None:
                del os.environ[EVENTS_VARIABLE]
        made.timeline = Timeline.read(events)
    if save_to is not None:
        made.timeline.save(save_to)


def process_started() -> float:
    """When this process was started, in seconds on CLOCK_MONOTONIC (to the kernel's tick)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")
