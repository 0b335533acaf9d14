"""The log of one server: what it writes to its standard output and error, of which only the newest is kept.

The server holds the file open, so it is cut in place: what it has is copied to `NAME.1`, then it begins anew. What is written
between the two is lost, as with logrotate's copytruncate.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from coldstart.system import secrets
from coldstart.system.proc import logs

LIMIT = 4 << 20
"""Bytes of the file; as many again of the one before it."""


class ServerLog:
    """A file that others append to. Nothing here raises OSError: a log ends no server."""

    def __init__(self, path: Path) -> None:
        self.path, self.before = path, path.with_name(f"{path.name}.1")

    def bound(self, limit: int = LIMIT) -> None:
        """Cut it when it has more than `limit` bytes; of what came meanwhile, the newest `limit` bytes stay."""
        with suppress(OSError), self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= limit:
                return
            file.seek(size - limit)
            with self.before.open("wb") as before:
                shutil.copyfileobj(file, before)
            os.truncate(self.path, 0)

    def tail(self, size: int) -> str:
        """Its last `size` bytes from the start of a line on, secrets masked."""
        text = b""
        for path in (self.before, self.path):
            with suppress(OSError), path.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - size))
                text += file.read(size)
        if len(text) > size:
            text = text[-size:].partition(b"\n")[2]
        return secrets.text(text.decode(errors="replace"))

    def find_error(self) -> str:
        """Return the error that ended the server, as `logs.words` finds it; empty where the log names none."""
        with suppress(OSError):
            return logs.words(self.path) or ""
        return ""

    def remove(self) -> None:
        """The server has ended."""
        for path in (self.path, self.before):
            with suppress(OSError):
                path.unlink(missing_ok=True)
