"""Record the timeline of one server, whose processes all append to one events file.

Invariant: the timeline is written once the server is ready, and again after it has ended. A server that outlives its recorder
continues without a recording.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from coldstart.system.proc import scratch
from coldstart.system.timeline import EVENTS_VARIABLE, Timeline, emit, now

_RUNNING: ContextVar[TimelineRecording | None] = ContextVar("recording", default=None)


class TimelineRecording:
    """Timeline as of the last read, empty before the first. `events` is the file of spans, `save_to` the destination."""

    def __init__(self, events: str, save_to: Path | None, *, temporary: bool) -> None:
        self.timeline = Timeline()
        self._events: str | None = events
        self._save_to, self._temporary = save_to, temporary

    def save(self) -> None:
        """Read the current spans and write them to `save_to`, if set.

        Raises:
            OSError, ValueError: They cannot be read or written. Without a file to save to, the timeline remains as it was:
                spans that a full disk has cut do not end a server.
        """
        if self._events is None:
            return
        try:
            self.timeline = Timeline.read(self._events)
        except (OSError, ValueError):
            if self._save_to is not None:
                raise
        if self._save_to is not None:
            self.timeline.save(self._save_to)

    def started(self) -> None:
        """Save the start of a ready server. End the recording without a file to save to. Raises the errors of `save`."""
        self.save()
        if self._save_to is None and self._temporary and self._events is not None:
            shutil.rmtree(Path(self._events).parent, ignore_errors=True)
            self._events = None


@contextmanager
def recording(save_to: Path | None = None) -> Iterator[TimelineRecording]:
    """Record the processes started in the block, and write Chrome trace-event JSON to `save_to`, if set.

    Where the environment names an events file, it is used, and retained. A block within another one adds to its recording.

    Raises:
        OSError, ValueError: As `TimelineRecording.save`.
        UsageError: No private directory can be created.
    """
    if save_to is None and (running := _RUNNING.get()) is not None:
        yield running
        return
    outside = os.environ.get(EVENTS_VARIABLE)
    with scratch.private_directory(scratch.RECORDING) as directory:
        events = outside or str(directory / "events")
        os.environ[EVENTS_VARIABLE] = events
        timeline_recording = TimelineRecording(events, save_to, temporary=outside is None)
        emit("coldstart", process_started(), now(), track="command")
        token = _RUNNING.set(timeline_recording)
        try:
            yield timeline_recording
        finally:
            _RUNNING.reset(token)
            if outside is None:
                del os.environ[EVENTS_VARIABLE]
        timeline_recording.save()


def process_started() -> float:
    """Return the start time of this process on CLOCK_MONOTONIC in seconds, with the resolution of the kernel's tick."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")
