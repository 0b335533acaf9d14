"""The host's log: one JSON object a line on standard error, secrets masked.

Members: ts (UTC, ISO 8601), event, and what belongs to the event (model, request, seconds, mode, reason, ...).
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import IO, Any

from coldstart.system import secrets


class Log:
    """Writes to `sink`, by default standard error. `say` never raises: a log that cannot be written ends no server."""

    def __init__(self, sink: IO[str] | None = None, *, quiet: bool = False) -> None:
        self._sink, self._quiet = sink, quiet

    def say(self, event: str, **members: Any) -> None:
        """One line; members that are None are left out."""
        if self._quiet:
            return
        given = {name: value for name, value in members.items() if value is not None}
        line = {"ts": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **given}
        try:
            sink = self._sink or sys.stderr
            sink.write(json.dumps(secrets.document(line), default=str) + "\n")
            sink.flush()
        except (OSError, ValueError):
            self._quiet = True
