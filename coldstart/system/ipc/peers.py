"""Who is at the other end of a unix socket: this user, or nobody whom we listen to. Standard library only."""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 0.1


class PeerError(RuntimeError):
    """The other side is not there, or is another user's."""


class Listener:
    """A listening socket that only this user can reach (directory 0700, socket 0600).

    A connection for which no descriptor is left would stay in the queue and keep the socket readable. One descriptor is
    kept in reserve, so that such a connection can be closed and its client told at once.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        previous = os.umask(0o177)
        try:
            self.socket.bind(str(path))
        finally:
            os.umask(previous)
        self.socket.listen(16)
        self.socket.setblocking(False)
        self._reserve: int | None = _reserve()

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def accept(self) -> socket.socket | None:
        """The next connection of this user, blocking; None when it has gone, is another user's or cannot be had now."""
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
        """Close the socket; its path stays."""
        self.socket.close()
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _reserve() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def peer_uid(connection: socket.socket) -> int:
    """The user id of the process at the other end, as the kernel knows it. Raises OSError for what is no unix socket."""
    size = struct.calcsize("3i")
    return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1])


def trusted(connection: socket.socket) -> bool:
    """Whether the other end is this user's, or root's, who can do anyway whatever this user can."""
    try:
        return peer_uid(connection) in (0, os.getuid())
    except OSError:
        return False


def connect(path: Path) -> socket.socket:
    """Connect to a server of this user. Raises PeerError when nobody, or another user, listens there."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        client.connect(str(path))
    except OSError as error:
        client.close()
        raise PeerError(f"nobody listens at {path}: {error.strerror}") from error
    if not trusted(client):
        client.close()
        raise PeerError(f"who listens at {path} is another user")
    return client
