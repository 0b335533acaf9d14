"""Start-up timeline: spans on CLOCK_MONOTONIC, merged from several processes.

CLOCK_MONOTONIC has one origin for all processes of a machine, so spans of different processes need no clock
synchronisation. A child process appends one JSON line per span to the file named by COLDSTART_TIMELINE_EVENTS. The
line is one write(2) on an O_APPEND descriptor, so lines never mix.

Launchers that live a few milliseconds import this module: at module level it imports nothing but os, sys and time.
Chrome trace-event format: the "X" (complete) and "M" (metadata) events of the Trace Event Format document.
"""

from __future__ import annotations

import os
import time

from coldstart.contract import environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

EVENTS_VARIABLE = environment.TIMELINE_EVENTS
# Seconds to add to this process's clock, because a process thawed into a time namespace has its own clock.
OFFSET_VARIABLE = environment.TIMELINE_OFFSET_S
MAX_BYTES = 64 << 20
"""Maximum size of an events file, because a server may run for months."""

now = time.monotonic
on_begin: Callable[[str], object] | None = None
"""Called with the name of each span that `measure` begins in this process."""


def emit(
    name: str, start_s: float, end_s: float, track: str, args: Mapping[str, object] | None = None
) -> None:
    """Append one span to the file named by COLDSTART_TIMELINE_EVENTS. Do nothing if the variable is unset.

    Times are seconds on CLOCK_MONOTONIC. Do nothing either if the file is full or cannot be written: a server outlives its
    recorder, which removes the file's directory.
    """
    path = EVENTS_VARIABLE.read()
    if path:
        from contextlib import suppress

        offset_s = OFFSET_VARIABLE.read()
        with suppress(OSError):
            append(path, Span(name, start_s + offset_s, end_s + offset_s, track, args))


def append(path: str | Path, span: Span) -> None:
    """Append `span` to an events file as one line, atomically, up to MAX_BYTES. Raises OSError."""
    import json

    line = json.dumps({name: getattr(span, name) for name in Span.__slots__}, separators=(",", ":")) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_size + len(line) <= MAX_BYTES:
            os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


class measure:
    """Context manager that emits the span of its block, also if the block raises: `with measure("imports", track="server")`."""

    def __init__(self, name: str, track: str, args: Mapping[str, object] | None = None) -> None:
        self.name, self.track, self.args = name, track, args

    def __enter__(self) -> None:
        if on_begin is not None:
            on_begin(self.name)
        self.start_s = now()

    def __exit__(self, *_: object) -> None:
        emit(self.name, self.start_s, now(), self.track, self.args)


class Span:
    """A named interval in seconds on CLOCK_MONOTONIC, of one process, on one track."""

    __slots__ = ("args", "end_s", "name", "pid", "start_s", "track")

    def __init__(
        self,
        name: str,
        start_s: float,
        end_s: float,
        track: str,
        args: Mapping[str, object] | None = None,
        pid: int | None = None,
    ) -> None:
        if end_s < start_s:
            raise ValueError(f"span {name!r} ends ({end_s}) before it starts ({start_s})")
        self.name, self.start_s, self.end_s, self.track = name, float(start_s), float(end_s), track
        self.args = dict(args or {})
        self.pid = os.getpid() if pid is None else pid

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class Timeline:
    """Timing spans that all processes of one start recorded."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self.spans: list[Span] = list(spans)

    @classmethod
    def read(cls, path: str | Path) -> Timeline:
        """Read the spans of an events file. Raises OSError, or ValueError with the number of an invalid line."""
        import json

        timeline = cls()
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 - pathlib costs a launcher milliseconds
            for number, line in enumerate(file, 1):
                try:
                    timeline.spans.append(Span(**json.loads(line)))
                except (ValueError, TypeError) as error:
                    raise ValueError(
                        f"line {number} of the timeline events is not a span: {error}"
                    ) from error
        return timeline

    @property
    def origin_s(self) -> float:
        """Return the earliest start, which is time zero in drawings."""
        return min((span.start_s for span in self.spans), default=0.0)

    def phases(self) -> dict[str, float]:
        """Return seconds by span name. Spans of one name are summed, in the order of their first start."""
        total: dict[str, float] = {}
        for span in sorted(self.spans, key=lambda span: span.start_s):
            total[span.name] = total.get(span.name, 0.0) + span.duration_s
        return total

    def find_longest(self, since_s: float = 0.0) -> tuple[str, float] | None:
        """Return name and seconds of the longest phase after `since_s`, None without one.

        Each moment belongs to the shortest span that contains it, so a span does not count for the spans within it.
        """
        from itertools import pairwise

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
        """Return name, track, start and end of each span, in seconds since `origin_s`, by default the earliest start."""
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
        """Return Chrome trace-event JSON, with times in microseconds from the earliest span. It opens in Perfetto.

        A thread of the format is a stack: spans of one process and track that overlap without nesting get a thread each.
        """
        events: list[dict[str, object]] = []
        threads: list[tuple[int, str, list[float]]] = []
        for span in sorted(self.spans, key=lambda span: (span.start_s, -span.end_s)):
            home = span.pid, span.track
            fitting = (
                n for n, (*owner, ends) in enumerate(threads, 1) if (*owner,) == home and _nest(span, ends)
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
        import json

        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump(self.build_chrome_trace(), file)


def _nest(span: Span, ends: list[float]) -> bool:
    """Add a span to the stack of the ends of open spans if it nests there. Return whether it does."""
    while ends and ends[-1] <= span.start_s:
        ends.pop()
    if ends and span.end_s > ends[-1]:
        return False
    ends.append(span.end_s)
    return True
