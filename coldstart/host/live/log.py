"""Log of the host: one line per event on standard error, with secrets masked.

A line is text on a terminal and a JSON object elsewhere. Its fields are ts (UTC, ISO 8601), event, and fields of the
event, such as model, request, seconds, mode and reason. Errors of background tasks are logged here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import IO, Any

from coldstart.artifacts.errors import BundleError
from coldstart.errors import ColdstartError, NoBundleError
from coldstart.host.events import NO_BUNDLE, Failure
from coldstart.system import secrets


class Log:
    """Log that writes to `sink` (default: standard error).

    `write` never raises, so that a failed write cannot stop a server.
    """

    def __init__(self, sink: IO[str] | None = None, *, quiet: bool = False) -> None:
        self._sink, self._quiet = sink, quiet

    def write(self, event: str, **members: Any) -> None:
        """Write one line. Fields whose value is None are omitted."""
        if self._quiet:
            return
        given = {name: value for name, value in members.items() if value is not None}
        line = {"ts": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **given}
        try:
            sink = self._sink or sys.stderr
            write = _format_text if sink.isatty() else _format_json
            sink.write(write(line) + "\n")
            sink.flush()
        except (OSError, ValueError):
            self._quiet = True


class _LogHandler(logging.Handler):
    """Handler that writes each record of Python's logging as one line of a log."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record and its exception as one line (logging.Handler)."""
        error = record.exc_info[1] if record.exc_info else None
        about = None if error is None else f"{type(error).__name__}: {error}"
        try:
            text = record.getMessage().strip()
        except (TypeError, ValueError):  # the arguments do not fit the text
            text = str(record.msg)
        self._log.write("message", logger=record.name, level=record.levelname, text=text, error=about)


@contextmanager
def capture_loggers(log: Log) -> Iterator[None]:
    """Forward warnings and errors from the loggers of libraries, such as uvicorn and asyncio, to `log` during the block."""
    handler, root = _LogHandler(log), logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


def _format_json(line: dict[str, Any]) -> str:
    return json.dumps(secrets.redact_document(line), default=str)


def _format_text(line: dict[str, Any]) -> str:
    shown = json.loads(_format_json(line))
    at, event = datetime.fromisoformat(shown.pop("ts")).astimezone(), shown.pop("event")
    members = " ".join(f"{name}={_format_value(value)}" for name, value in shown.items())
    return f"{at:%H:%M:%S} {event} {members}".rstrip()


def _format_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    # JSON escapes control characters in text.
    return value if isinstance(value, str) and value.isalnum() else json.dumps(value)


class BackgroundTasks:
    """Set of background tasks. It keeps references to the tasks, because the event loop keeps only weak references."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a background task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.log.write("internal error", reason=f"{type(error).__name__}: {error}")

    async def wait(self) -> None:
        """Wait until all tasks have ended, including tasks that are spawned while waiting."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def cancel(self) -> None:
        """Cancel all tasks."""
        for task in self._tasks:
            task.cancel()


def describe_failure(error: Exception) -> Failure | None:
    """Return the message, hint and code of a known error, or None if it is an internal error."""
    if isinstance(error, BundleError):
        return Failure(error.message, error.hint or "", error.code)
    if isinstance(error, ColdstartError):
        # Join the lines: HTTP responses and the log cannot distinguish them from quoted line breaks.
        summary, *details = error.lines
        message = f"{summary} {'; '.join(details)}".rstrip()
        return Failure(message, error.hint or "", NO_BUNDLE if isinstance(error, NoBundleError) else "")
    return None
