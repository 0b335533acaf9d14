"""Recording the timeline of one server: every process of it appends to one events file.

Invariant: the start is written once the server is ready, and all there is once more when it has ended; a server that
outlives its recorder runs on unrecorded.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coldstart.system.timeline import EVENTS_VARIABLE, Timeline, emit, now


class TimelineRecording:
    """The timeline as it was last read, empty before that; `events` is the file of spans, `save_to` the result."""

    def __init__(self, events: str | None, save_to: Path | None, *, temporary: bool = False) -> None:
        self.timeline = Timeline()
        self._events, self._save_to, self._temporary = events, save_to, temporary

    def save(self) -> None:
        """Read what there is so far, and write it where a file was asked for. Raises OSError."""
        if self._events is None:
            return
        self.timeline = Timeline.read(self._events)
        if self._save_to is not None:
            self.timeline.save(self._save_to)

    def started(self) -> None:
        """The server is ready: save its start. Without a file to save to, the recording ends here. Raises OSError."""
        self.save()
        if self._save_to is None and self._temporary and self._events is not None:
            shutil.rmtree(Path(self._events).parent)
            self._events = None


@contextmanager
def recording(save_to: Path | None, *, wanted: bool) -> Iterator[TimelineRecording]:
    """Record what is started in the block; written to `save_to` as Chrome trace-event JSON when it is named.

    Records when `wanted`, when there is a file to save to, or when somebody outside has named the events file; that one is
    kept. Raises OSError when the file cannot be written.
    """
    outside = os.environ.get(EVENTS_VARIABLE)
    if outside is None and not wanted and save_to is None:
        yield TimelineRecording(None, None)
        return
    with tempfile.TemporaryDirectory(prefix="coldstart-", ignore_cleanup_errors=True) as directory:
        events = outside or str(Path(directory) / "events")
        os.environ[EVENTS_VARIABLE] = events
        timeline_recording = TimelineRecording(events, save_to, temporary=outside is None)
        emit("coldstart", process_started(), now(), track="command")
        try:
            yield timeline_recording
        finally:
            if outside is None:
                del os.environ[EVENTS_VARIABLE]
        timeline_recording.save()


def process_started() -> float:
    """When this process was started, in seconds on CLOCK_MONOTONIC (to the kernel's tick)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")
