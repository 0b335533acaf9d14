"""Start-up timeline: spans on CLOCK_MONOTONIC, merged from several processes.

All processes of a machine share the origin of CLOCK_MONOTONIC, so their spans need no clock synchronization. Child
processes append one JSON line per span to the file in COLDSTART_TIMELINE_EVENTS. Each line is one write(2) on an O_APPEND
descriptor, so lines are never interleaved.

The output uses the "X" (complete) and "M" (metadata) events of Chrome's Trace Event Format.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from coldstart.contract import environment

MAX_BYTES = 64 << 20
"""Maximum size of an events file, because a server may run for months."""

now = time.monotonic
on_begin: Callable[[str], object] | None = None
"""Called with the name of each span that `measure` begins in this process."""


def emit_span(
    name: str, start_s: float, end_s: float, track: str, args: Mapping[str, object] | None = None
) -> None:
    """Append one span to the file in COLDSTART_TIMELINE_EVENTS. Times are seconds on CLOCK_MONOTONIC.

    Do nothing if the variable is unset, or if the file is full or cannot be written: a server may outlive its recorder,
    which removes the file's directory.
    """
    if path := environment.TIMELINE_EVENTS.read():
        # A process that is thawed into a time namespace has its own clock.
        offset_s = environment.TIMELINE_OFFSET_S.read()
        with suppress(OSError):
            append_span(path, Span(name, start_s + offset_s, end_s + offset_s, track, dict(args or {})))


def append_span(path: str | Path, span: Span) -> None:
    """Append `span` to an events file atomically, as one line of up to MAX_BYTES. Raises OSError."""
    line = msgspec.json.encode(span) + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_size + len(line) <= MAX_BYTES:
            os.write(descriptor, line)
    finally:
        os.close(descriptor)


@contextmanager
def measure(name: str, track: str) -> Iterator[None]:
    """Emit a span for the block, even if the block raises: `with measure("imports", track="server")`."""
    if on_begin is not None:
        on_begin(name)
    start_s = now()
    try:
        yield
    finally:
        emit_span(name, start_s, now(), track)


@dataclass(slots=True)
class Span:
    """Named interval of one process on one track, in seconds on CLOCK_MONOTONIC."""

    name: str
    start_s: float
    end_s: float
    track: str
    args: dict[str, Any] = field(default_factory=dict)
    pid: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        if self.end_s < self.start_s:
            raise ValueError(f"span {self.name!r} ends ({self.end_s}) before it starts ({self.start_s})")

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class Timeline:
    """Spans that all processes of one start recorded."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self.spans: list[Span] = list(spans)

    @classmethod
    def read(cls, path: str | Path) -> Timeline:
        """Read the spans of an events file. Raises OSError, or ValueError with the number of the invalid line."""
        timeline = cls()
        for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
            try:
                timeline.spans.append(msgspec.json.decode(line, type=Span))
            except ValueError as error:
                raise ValueError(
                    f"line {number} of the file of timeline events is not a span: {error}"
                ) from error
        return timeline

    @property
    def origin_s(self) -> float:
        """Return the earliest start of a span in seconds, which is time zero in charts."""
        return min((span.start_s for span in self.spans), default=0.0)

    def sum_phases(self) -> dict[str, float]:
        """Return the total seconds of the spans of each name, in the order in which they first started."""
        total: dict[str, float] = {}
        for span in sorted(self.spans, key=lambda span: span.start_s):
            total[span.name] = total.get(span.name, 0.0) + span.duration_s
        return total

    def find_longest(self, since_s: float = 0.0) -> tuple[str, float] | None:
        """Return the name and the seconds of the longest phase after `since_s`, or None if there are no spans.

        Each moment counts only for the shortest span that contains it, so a span does not include the time of nested
        spans.
        """
        spans = [span for span in self.spans if span.start_s >= since_s]
        moments = sorted({moment for span in spans for moment in (span.start_s, span.end_s)})
        own: dict[str, float] = {}
        for begin, end in pairwise(moments):
            active = [span for span in spans if span.start_s <= begin and end <= span.end_s]
            if active:
                name = min(active, key=lambda span: span.duration_s).name
                own[name] = own.get(name, 0.0) + end - begin
        return max(own.items(), key=lambda item: item[1], default=None)

    def describe_spans(self, origin_s: float | None = None) -> list[dict[str, object]]:
        """Return the name, track, start and end of each span, in seconds since `origin_s` (default: the earliest start)."""
        origin = self.origin_s if origin_s is None else origin_s
        return [
            {
                "name": span.name,
                "track": span.track,
                "start_s": max(span.start_s - origin, 0.0),
                "end_s": span.end_s - origin,
            }
            for span in self.spans
        ]

    def build_chrome_trace(self) -> dict[str, object]:
        """Return Chrome trace-event JSON, which opens in Perfetto. Times are microseconds since the earliest span.

        A thread of the format is a stack, so spans of one process and track that overlap without nesting get separate
        threads.
        """
        events: list[dict[str, object]] = []
        threads: list[tuple[int, str, list[float]]] = []
        for span in sorted(self.spans, key=lambda span: (span.start_s, -span.end_s)):
            home = span.pid, span.track
            fitting = (
                n
                for n, (*owner, ends) in enumerate(threads, 1)
                if (*owner,) == home and _push_nested(span, ends)
            )
            if (number := next(fitting, 0)) == 0:
                threads.append((*home, [span.end_s]))
                number = len(threads)
                for name, value in (("process_name", f"pid {span.pid}"), ("thread_name", span.track)):
                    args = {"name": value}
                    events.append({"name": name, "ph": "M", "pid": span.pid, "tid": number, "args": args})
            times = {
                "ts": round((span.start_s - self.origin_s) * 1e6, 3),
                "dur": round(span.duration_s * 1e6, 3),
            }
            place = {"cat": span.track, "pid": span.pid, "tid": number}
            events.append({"name": span.name, "ph": "X", **place, **times, "args": span.args})
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save(self, path: str | Path) -> None:
        """Write `build_chrome_trace()` as JSON. Raises OSError."""
        Path(path).write_text(json.dumps(self.build_chrome_trace()), encoding="utf-8")


def _push_nested(span: Span, ends: list[float]) -> bool:
    """Push a span onto a stack of end times if it nests in the open spans, and return whether it does."""
    while ends and ends[-1] <= span.start_s:
        ends.pop()
    if ends and span.end_s > ends[-1]:
        return False
    ends.append(span.end_s)
    return True
