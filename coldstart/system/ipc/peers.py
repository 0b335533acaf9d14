"""Unix sockets that accept and contact only processes of this user or root. Standard library only."""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LONGEST_PATH = 107
"""Bytes of the longest path of a unix socket."""
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 0.1


class PeerError(RuntimeError):
    """The other process is not running, or belongs to another user."""


class Listener:
    """A listening socket that only this user can reach (directory 0700, socket 0600).

    Without a free descriptor, a connection would stay in the queue and keep the socket readable. One descriptor is
    held in reserve, so that such a connection can be accepted and closed, and its client gets an error at once.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        previous = os.umask(0o177)
        try:
            with _shorten(path) as address:
                self.socket.bind(address)
        finally:
            os.umask(previous)
        self.socket.listen(16)
        self.socket.setblocking(False)
        self._reserve: int | None = _reserve()

    def fileno(self) -> int:
        """Return the socket's descriptor, for selectors."""
        return self.socket.fileno()

    def accept(self) -> socket.socket | None:
        """Accept the next connection, blocking. Return None if it has closed, is another user's, or cannot be accepted now."""
        try:
            connection, _ = self.socket.accept()
        except OSError as error:
            if error.errno in _SHORTAGES:
                self._turn_away()
            return None
        connection.setblocking(True)
        if trusted(connection):
            return connection
        connection.close()
        return None

    def _turn_away(self) -> None:
        if self._reserve is None:
            time.sleep(_PAUSE_S)  # the socket stays readable: without a pause the caller's loop would spin
        else:
            os.close(self._reserve)
            with suppress(OSError):
                self.socket.accept()[0].close()
        self._reserve = _reserve()

    def close(self) -> None:
        """Close the socket. Its path remains."""
        self.socket.close()
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _shorten(path: Path) -> Iterator[str]:
    """Yield an address of the socket at `path` that the kernel accepts, for a longer path one that names its open directory."""
    if len(os.fsencode(path)) <= LONGEST_PATH:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _reserve() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def peer_uid(connection: socket.socket) -> int:
    """Return the user id of the process at the other end, as the kernel reports it. Raises OSError for other sockets."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


def trusted(connection: socket.socket) -> bool:
    """Return whether the other end belongs to this user, or to root, who has all rights of this user anyway."""
    try:
        return peer_uid(connection) in (0, os.getuid())
    except OSError:
        return False


def connect(path: Path) -> socket.socket:
    """Connect to a server of this user. Raises PeerError if no process listens, or one of another user."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _shorten(path) as address:
            client.connect(address)
    except OSError as error:
        client.close()
        raise PeerError(f"cannot connect to {path}: {error.strerror}") from error
    if not trusted(client):
        client.close()
        raise PeerError(f"the server at {path} belongs to another user")
    return client
