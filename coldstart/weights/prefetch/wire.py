"""What goes over the prefetcher's unix socket: one JSON object a line in both directions.

A line is at most LINE bytes. What is bulky (a plan, names) travels beside it as a sealed memfd, so that the receiver never
waits for a slow sender and nobody changes it afterwards.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LINE = 1 << 16
MAX_BODY = 128 << 20
_MAX_DESCRIPTORS = 8
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Malformed(ValueError):
    """The other side does not speak this language."""


class Channel:
    """One end of a connection: complete messages in, descriptors beside them."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.descriptors: deque[int] = deque()
        self._pending = b""

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def receive(self, limit: int | None = LINE) -> list[dict[str, Any]] | None:
        """The messages that one read completes; None at the end of the connection.

        Raises Malformed for a line over `limit` bytes, one that is no JSON object, or too many descriptors.
        """
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self.socket, 1 << 18, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            return None
        self.descriptors.extend(descriptors)
        if not data:
            return None
        if len(self.descriptors) > _MAX_DESCRIPTORS:
            raise Malformed("too many descriptors")
        *lines, self._pending = (self._pending + data).split(b"\n")
        if limit is not None and max(map(len, [*lines, self._pending])) > limit:
            raise Malformed(f"a line of more than {limit} bytes")
        return list(map(_object, lines))

    def take(self) -> int:
        """The oldest descriptor received, now the caller's. Raises Malformed when there is none."""
        if not self.descriptors:
            raise Malformed("a descriptor is missing")
        return self.descriptors.popleft()

    def close(self) -> None:
        """Close the connection and descriptors that nobody took."""
        while self.descriptors:
            os.close(self.descriptors.popleft())
        self.socket.close()


def _object(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"a line that is no JSON: {error}") from error
    if not isinstance(message, dict):
        raise Malformed("a line that is no JSON object")
    return message


def encode(message: dict[str, Any]) -> bytes:
    """A message as its line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def sealed(*parts: bytes) -> int:
    """A memfd holding the parts, a newline between them, that nobody can change. The caller closes it."""
    descriptor = os.memfd_create("coldstart-request", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(b"\n".join(parts))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def body(descriptor: int) -> tuple[bytes, bytes]:
    """The two parts of a `sealed` memfd, which is closed. Raises Malformed for any other descriptor."""
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise Malformed("a descriptor that is not sealed")
        size = os.fstat(descriptor).st_size
        if size > MAX_BODY:
            raise Malformed(f"a body of {size} bytes")
        head, _, rest = os.pread(descriptor, size, 0).partition(b"\n")
    except OSError as error:
        raise Malformed(f"a descriptor of another kind: {error.strerror}") from error
    finally:
        os.close(descriptor)
    return head, rest


def place(directory: Path | None) -> Path:
    """Where the socket lies."""
    from coldstart.machine import paths

    return (directory or paths.runtime_dir()) / "prefetch.socket"


def replies(channel: Channel) -> Iterator[dict[str, Any]]:
    """Messages until the connection ends, blocking."""
    while (messages := channel.receive(None)) is not None:
        yield from messages
