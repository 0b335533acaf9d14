"""Unix sockets that communicate only with processes of this user or root, and waiting for descriptors.

This module imports only the standard library.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

MAX_SOCKET_PATH_BYTES = 107
"""Maximum length of a Unix socket path in bytes."""
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 0.1


class PeerError(RuntimeError):
    """Error for a process that is not running, or that belongs to another user."""


class Listener(AbstractContextManager["Listener"]):
    """Listening socket that only this user can reach (directory 0700, socket 0600).

    One descriptor is held in reserve. When the process runs out of descriptors, a pending connection can then be accepted
    and closed, so that its client gets an error at once and the socket does not stay readable.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        previous = os.umask(0o177)
        try:
            with _shorten_path(path) as address:
                self.socket.bind(address)
        finally:
            os.umask(previous)
        self.socket.listen(16)
        self.socket.setblocking(False)
        self._reserve: int | None = _open_reserve()

    def fileno(self) -> int:
        """Return the socket's descriptor, for selectors."""
        return self.socket.fileno()

    def accept(self) -> socket.socket | None:
        """Wait for the next connection and return it.

        Return None if it was closed, belongs to another user, or no descriptor is free.
        """
        try:
            connection, _ = self.socket.accept()
        except OSError as error:
            if error.errno in _SHORTAGES:
                self._reject_client()
            return None
        connection.setblocking(True)
        if is_trusted_peer(connection):
            return connection
        connection.close()
        return None

    def _reject_client(self) -> None:
        if self._reserve is None:
            time.sleep(_PAUSE_S)  # the socket stays readable, so the caller's loop would spin without a pause
        else:
            os.close(self._reserve)
            with suppress(OSError):
                self.socket.accept()[0].close()
        self._reserve = _open_reserve()

    def close(self) -> None:
        """Close the socket without removing its path."""
        self.socket.close()
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _shorten_path(path: Path) -> Iterator[str]:
    """Yield an address for the socket at `path`.

    A path that is too long for the kernel is replaced with a path through /proc/self/fd.
    """
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _open_reserve() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def read_peer_uid(connection: socket.socket) -> int:
    """Return the user ID of the process at the other end, as the kernel reports it. Raises OSError for other sockets."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


def is_trusted_peer(connection: socket.socket) -> bool:
    """Return whether the process at the other end belongs to this user or to root."""
    try:
        return read_peer_uid(connection) in (0, os.getuid())
    except OSError:
        return False


def connect(path: Path) -> socket.socket:
    """Return a connection to the socket `path`. Raises PeerError if no process of this user or root listens on it."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _shorten_path(path) as address:
            client.connect(address)
    except OSError as error:
        client.close()
        raise PeerError(f"cannot connect to {path}: {error.strerror}") from error
    if not is_trusted_peer(client):
        client.close()
        raise PeerError(f"the server at {path} belongs to another user")
    return client


def await_readable(*files: Any, timeout_s: float | None = None) -> list[Any]:
    """Wait until a file has data or has ended, at most `timeout_s` seconds if given, and return the files that have.

    `files` are descriptors or objects with a `fileno` method. Unlike `select.select`, a descriptor can be above 1,023.
    """
    with selectors.PollSelector() as selector:
        for file in files:
            selector.register(file, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(timeout_s)]
