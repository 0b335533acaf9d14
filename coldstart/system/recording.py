"""Record the timeline of one server, whose processes all append to one events file.

Invariant: the timeline is written once the server is ready, and again after it has ended. A server that outlives its recorder
continues without a recording.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from coldstart.system.proc import processes, scratch
from coldstart.system.timeline import EVENTS_VARIABLE, Timeline, emit, now


@dataclass
class TimelineRecording:
    """Timeline as of the last read, empty before the first; `directory` contains the file `events` unless another names it."""

    events: str
    directory: Path
    save_to: Path | None
    timeline: Timeline = field(default_factory=Timeline)

    def started(self) -> None:
        """Read the start of a ready server, and save it or end the recording.

        Raises:
            OSError, ValueError: The spans cannot be read or saved. Without a file to save to there are none then: spans that a
                full disk has cut do not end a server.
        """
        try:
            self.timeline = Timeline.read(self.events)
        except (OSError, ValueError):
            if self.save_to is not None:
                raise
        if self.save_to is None:
            shutil.rmtree(self.directory, ignore_errors=True)
        else:
            self.timeline.save(self.save_to)


@contextmanager
def recording(save_to: Path | None = None) -> Iterator[TimelineRecording]:
    """Record the processes started in the block, and write Chrome trace-event JSON to `save_to`, if set.

    Where the environment names an events file, it is used, and retained.

    Raises:
        OSError, ValueError: As `TimelineRecording.started`.
        UsageError: No private directory can be created.
    """
    outside = os.environ.get(EVENTS_VARIABLE)
    with scratch.private_directory(scratch.RECORDING) as directory:
        events = os.environ[EVENTS_VARIABLE] = outside or str(directory / "events")
        ticks = int(processes.stat_fields(os.getpid())[19])  # on CLOCK_MONOTONIC
        emit("coldstart", ticks / os.sysconf("SC_CLK_TCK"), now(), track="command")
        recorded = TimelineRecording(events, directory, save_to)
        try:
            yield recorded
        finally:
            if outside is None:
                del os.environ[EVENTS_VARIABLE]
        if save_to is not None:
            recorded.started()
