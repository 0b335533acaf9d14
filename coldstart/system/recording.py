"""Record the timeline of one server, whose processes all append to one events file, and draw it as bars of text.

Invariant: the timeline is written once the server is ready, and again after it has ended. A server that outlives its recorder
continues without a recording.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coldstart.system.proc import processes, scratch
from coldstart.system.timeline import EVENTS_VARIABLE, Span, Timeline, emit, now

MIN_WIDTH = 40


class TimelineRecording:
    """Timeline as of the last read, empty before the first; `directory` contains the file `events` unless another names it."""

    def __init__(self, events: str, directory: Path, save_to: Path | None) -> None:
        self.timeline = Timeline()
        self._events, self._directory, self._save_to = events, directory, save_to

    def save(self) -> None:
        """Read the current spans and write them to the file to save to.

        Raises:
            OSError, ValueError: They cannot be read or written. Without a file to save to, the timeline remains as it was:
                spans that a full disk has cut do not end a server.
        """
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
        if self._save_to is None:
            shutil.rmtree(self._directory, ignore_errors=True)


@contextmanager
def recording(save_to: Path | None = None) -> Iterator[TimelineRecording]:
    """Record the processes started in the block, and write Chrome trace-event JSON to `save_to`, if set.

    Where the environment names an events file, it is used, and retained.

    Raises:
        OSError, ValueError: As `TimelineRecording.save`.
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
            recorded.save()


def draw(timeline: Timeline, width: int = 80, *, encoding: str | None = None) -> str:
    """Return bars by track as plain text, no line longer than `width` columns (at least MIN_WIDTH).

    Bars use block characters if `encoding` (default: stdout's) has them, ASCII otherwise. Without spans the text is empty.
    """
    spans = sorted(timeline.spans, key=lambda span: span.start_s)
    if not spans:
        return ""
    encoding = encoding or sys.stdout.encoding or "ascii"
    block, ellipsis = "█…" if "█…".encode(encoding, "replace").decode(encoding) == "█…" else "#~"
    label_width = min(max(len(span.name) + 2 for span in spans), max(width, MIN_WIDTH) // 3)
    bar_width = max(width, MIN_WIDTH) - label_width - 12
    total_s = max(span.end_s for span in spans) - timeline.origin_s

    def clip(text: str, columns: int) -> str:
        text = text.encode(encoding, "replace").decode(encoding)
        return text if len(text) <= columns else text[: columns - 1] + ellipsis

    def format_line(span: Span) -> str:
        scale = bar_width / total_s if total_s else 0.0
        left = min(int((span.start_s - timeline.origin_s) * scale), bar_width - 1)
        bar = " " * left + block * max(1, min(round(span.duration_s * scale), bar_width - left))
        label = clip("  " + span.name, label_width)
        return f"{label:{label_width}} {bar:{bar_width}} {span.duration_s:8.3f} s"

    lines = []
    for track in dict.fromkeys(span.track for span in spans):
        lines.append(clip(track, label_width + bar_width))
        lines.extend(format_line(span) for span in spans if span.track == track)
    lines.append(f"{'':{label_width}} 0{'':{bar_width - 1}} {total_s:8.3f} s")
    return "\n".join(lines)
