"""Record the timeline of one server, whose processes all append to one events file.

The timeline is written when the server is ready, and again after it has exited. A server that outlives its recorder
continues without recording.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from coldstart.contract.environment import TIMELINE_EVENTS
from coldstart.system.proc import processes, scratch
from coldstart.system.timeline import Timeline, emit_span, now


@dataclass
class TimelineRecording:
    """Timeline of a server, as it was last read.

    `directory` contains the file `events`, unless an environment variable specifies another file.
    """

    events: str
    directory: Path
    save_to: Path | None
    timeline: Timeline = field(default_factory=Timeline)

    def save_start(self) -> None:
        """Read the timeline of a ready server and save it or, if `save_to` is None, stop recording.

        Raises:
            OSError, ValueError: The spans cannot be read or saved. If `save_to` is None, read errors are ignored, because
                a full disk that truncates spans must not end a server.
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
def record_timeline(save_to: Path | None = None) -> Iterator[TimelineRecording]:
    """Record the processes started in the block, and write Chrome trace-event JSON to `save_to` if it is set.

    If an environment variable specifies an events file, that file is used and kept.

    Raises:
        OSError, ValueError: See `TimelineRecording.save_start`.
        UsageError: No private directory can be created.
    """
    outside = os.environ.get(TIMELINE_EVENTS)
    with scratch.private_directory(scratch.RECORDING) as directory:
        events = os.environ[TIMELINE_EVENTS] = outside or str(directory / "events")
        began_s = int(processes.read_stat_fields(os.getpid())[19]) / os.sysconf("SC_CLK_TCK")
        # The kernel counts on CLOCK_BOOTTIME, which runs on while the machine is suspended.
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - began_s
        emit_span("coldstart", now() - age_s, now(), track="command")
        recorded = TimelineRecording(events, directory, save_to)
        try:
            yield recorded
        finally:
            if outside is None:
                del os.environ[TIMELINE_EVENTS]
        if save_to is not None:
            recorded.save_start()
