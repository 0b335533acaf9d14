"""Log of one server: the most recent part of its standard output and error.

The server keeps the file open, so its newest bytes are copied to `NAME.1` and the file is truncated in place. Lines written
between these two steps are lost, as with logrotate's copytruncate.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

from coldstart.system import secrets
from coldstart.system.proc import exits

LIMIT = 4 << 20
"""Maximum size in bytes of the log file, and of the rotated file `NAME.1`."""

BLOCK = 64 << 10
# Interval in seconds between reads of a followed log.
FOLLOW_S = 0.2


class ServerLog:
    """Log file to which a server appends. No method raises OSError, because a failure of the log must not stop a server."""

    def __init__(self, path: Path) -> None:
        self.path, self.before = path, path.with_name(f"{path.name}.1")

    def truncate(self, limit: int = LIMIT) -> None:
        """If the log file exceeds `limit` bytes, copy its last `limit` bytes to the rotated file `NAME.1`, and empty it."""
        with suppress(OSError), self.path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > limit:
                file.seek(-limit, os.SEEK_END)
                with self.before.open("wb") as before:
                    shutil.copyfileobj(file, before)
                os.truncate(self.path, 0)

    def tail(self, size: int) -> str:
        """Return the last `size` bytes of the log, beginning at the start of a line and with secrets masked."""
        text = b""
        for path in (self.before, self.path):
            with suppress(OSError), path.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - size))
                text += file.read(size)
        if len(text) > size:
            text = text[-size:].partition(b"\n")[2]
        return secrets.redact_text(text.decode(errors="replace"))

    async def follow(self, size: int, ended: asyncio.Future[str]) -> AsyncIterator[str]:
        """Yield the last `size` bytes and all later lines until `ended` is done, with secrets masked."""
        with suppress(OSError), self.path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            if file.tell():
                file.readline(BLOCK)
            rest = b""
            while True:
                has_ended = ended.done()
                if os.fstat(file.fileno()).st_size < file.tell():  # it was truncated
                    file.seek(0)
                text = rest + file.read(BLOCK)
                # Yield complete lines, so that no secret is split and missed. A line longer than a block is split.
                end = text.rfind(b"\n") + 1
                if has_ended or (not end and len(text) > BLOCK):
                    end = len(text)
                rest = text[end:]
                if end:
                    yield secrets.redact_text(text[:end].decode(errors="replace"))
                elif has_ended:
                    return
                else:
                    await asyncio.wait([ended], timeout=FOLLOW_S)

    def find_error(self) -> str:
        """Return the error that made the server exit (see `exits.find_last_error`), or "" if the log contains none."""
        with suppress(OSError):
            return exits.find_last_error(self.path) or ""
        return ""

    def remove(self) -> None:
        """Delete the log files of a server that has exited."""
        for path in (self.path, self.before):
            with suppress(OSError):
                path.unlink(missing_ok=True)
