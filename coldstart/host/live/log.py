"""Log of the host: one JSON object per line on standard error, with secrets masked.

Members: ts (UTC, ISO 8601), event, and members of the event (model, request, seconds, mode, reason, ...).
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import IO, Any

from coldstart.system import secrets


class Log:
    """JSON log with the output `sink`, by default standard error.

    `say` never raises: a failed write must not end a server.
    """

    def __init__(self, sink: IO[str] | None = None, *, quiet: bool = False) -> None:
        self._sink, self._quiet = sink, quiet

    def say(self, event: str, **members: Any) -> None:
        """Write one line; members that are None are omitted."""
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
