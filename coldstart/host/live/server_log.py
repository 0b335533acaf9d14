"""Log of one server: the newest part of its standard output and error.

The server holds the file open, so the file is truncated in place: its content is copied to `NAME.1`, then it is
emptied. Lines written between the two steps are lost, as with logrotate's copytruncate; the copy's end is made just
before. A reader that was behind goes on at the begin of the emptied file.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from threading import Lock

from coldstart.system import secrets
from coldstart.system.proc import exits

LIMIT = 4 << 20
"""Limit of the file in bytes; the previous file has the same limit."""

BLOCK = 64 << 10


class LogReader:
    """Lines of one log from a position on, also after the file was truncated or deleted."""

    def __init__(self, log: ServerLog, size: int) -> None:
        """Begin with the last `size` bytes. Raises OSError."""
        self._log = log
        self._file = log.path.open("rb")
        start = max(0, os.fstat(self._file.fileno()).st_size - size)
        self._file.seek(start)
        if start:
            self._file.readline(BLOCK)
        self._rest = b""

    def read(self, *, last: bool = False) -> str:
        """Return the complete lines since the last call, with secrets masked; with `last` also an incomplete line."""
        with self._log.lock:
            if os.fstat(self._file.fileno()).st_size < self._file.tell():
                self._file.seek(0)
            text = self._rest + self._file.read(BLOCK)
        # A secret could be split at the end of a part, so parts end with a line; a line longer than a block is
        # passed on in parts.
        end = text.rfind(b"\n") + 1
        if last or (not end and len(text) > BLOCK):
            end = len(text)
        text, self._rest = text[:end], text[end:]
        return secrets.text(text.decode(errors="replace"))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ServerLog:
    """File that a server appends to. Only `follow` raises OSError: a log must not end a server.

    `lock` is held while it is truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.before = path, path.with_name(f"{path.name}.1")
        self.lock = Lock()

    def bound(self, limit: int = LIMIT) -> None:
        """Truncate the file if it exceeds `limit` bytes, after copying its newest `limit` bytes to the previous file."""
        with suppress(OSError), self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= limit:
                return
            file.seek(size - limit)
            with self.before.open("wb") as before:
                shutil.copyfileobj(file, before)
                with self.lock:
                    shutil.copyfileobj(file, before)
                    before.flush()
                    os.truncate(self.path, 0)

    def tail(self, size: int) -> str:
        """Return the last `size` bytes of the log from the start of a line, with secrets masked."""
        text = b""
        for path in (self.before, self.path):
            with suppress(OSError), path.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - size))
                text += file.read(size)
        if len(text) > size:
            text = text[-size:].partition(b"\n")[2]
        return secrets.text(text.decode(errors="replace"))

    def follow(self, size: int) -> LogReader:
        """Return a reader of the last `size` bytes and of all later lines. Raises OSError."""
        return LogReader(self, size)

    def find_error(self) -> str:
        """Return the error that ended the server, as `logs.words` finds it; empty if the log contains none."""
        with suppress(OSError):
            return exits.find_error(self.path) or ""
        return ""

    def remove(self) -> None:
        """Delete the log of a server that has ended."""
        for path in (self.path, self.before):
            with suppress(OSError):
                path.unlink(missing_ok=True)
