"""One protocol between our own processes on one machine: JSON objects, one a line, over a unix stream socket.

Descriptors travel beside a line. What is bulky travels as a sealed memfd, so that the receiver never waits for a slow
sender and nobody changes it afterwards. An open connection is a lease: its end tells of the other side's.
Standard library only, for clients that live a few milliseconds.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import select
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from coldstart.system.ipc.peers import PeerError

LINE = 1 << 16
MAX_REQUEST = 1 << 20
MAX_BODY = 128 << 20
# Whoever connects and says nothing must not keep a server from its other clients, nor from its signals.
PATIENCE_S = 5.0
_MAX_DESCRIPTORS = 8
_RIGHTS = socket.CMSG_SPACE(4 * _MAX_DESCRIPTORS)
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class MalformedMessageError(PeerError):
    """The other side does not speak this language."""


class Channel:
    """One end of a connection: complete messages in and out, descriptors beside them. A context manager."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.descriptors: deque[int] = deque()
        self._pending = b""

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def send(self, message: Mapping[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        """Send one message, blocking, and with its first byte the descriptors. Raises OSError when it cannot be sent."""
        line = encode(message)
        sent = send_some(self.socket, line, descriptors)
        if sent < len(line):  # sending nothing would fail where the other end has gone since
            self.socket.sendall(memoryview(line)[sent:])

    def receive(self, limit: int | None = LINE) -> list[dict[str, Any]] | None:
        """The messages that one read completes; None at the end of the connection.

        Raises MalformedMessageError for a line over `limit` bytes, one that is no JSON object, or too many descriptors.
        """
        try:
            # Not socket.recv_fds, which drops the flag that keeps our children from inheriting the descriptors.
            data, rights, flags, _ = self.socket.recvmsg(1 << 18, _RIGHTS, socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            return None
        for _, _, descriptors in rights:
            self.descriptors.extend(array.array("i", descriptors))
        if not data:
            return None
        if len(self.descriptors) > _MAX_DESCRIPTORS or flags & socket.MSG_CTRUNC:
            raise MalformedMessageError("too many descriptors")
        *lines, self._pending = (self._pending + data).split(b"\n")
        if limit is not None and max(map(len, [*lines, self._pending])) > limit:
            raise MalformedMessageError(f"a line of more than {limit} bytes")
        return list(map(_object, lines))

    def request(self) -> dict[str, Any]:
        """The one message that a client sends first, within PATIENCE_S seconds in all.

        Raises MalformedMessageError on anything cut short, longer than MAX_REQUEST bytes, too slow, or followed by more.
        """
        deadline = time.monotonic() + PATIENCE_S
        while select.select([self.socket], [], [], max(0.0, deadline - time.monotonic()))[0]:
            messages = self.receive(MAX_REQUEST)
            if messages is None:
                raise MalformedMessageError("a request that is cut short")
            if len(messages) > 1 or (messages and self._pending):
                raise MalformedMessageError("more than one request")
            if messages:
                return messages[0]
        raise MalformedMessageError(f"no request within {PATIENCE_S:g} s")

    def replies(self) -> Iterator[dict[str, Any]]:
        """Messages until the connection ends, blocking."""
        while (messages := self.receive(None)) is not None:
            yield from messages

    def take(self) -> int:
        """The oldest descriptor received, now the caller's. Raises MalformedMessageError when there is none."""
        if not self.descriptors:
            raise MalformedMessageError("a descriptor is missing")
        return self.descriptors.popleft()

    def close(self) -> None:
        """Close the connection and descriptors that nobody took."""
        self.close_descriptors()
        self.socket.close()

    def close_descriptors(self) -> None:
        """Close those that nobody took."""
        while self.descriptors:
            os.close(self.descriptors.popleft())

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def send_some(connection: socket.socket, data: bytes | bytearray, descriptors: tuple[int, ...] = ()) -> int:
    """Send what the socket takes now, the descriptors with its first byte; how many bytes. Raises as sendmsg."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    return connection.sendmsg([data], rights)


def _object(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MalformedMessageError(f"a line that is no JSON: {error}") from error
    if not isinstance(message, dict):
        raise MalformedMessageError("a line that is no JSON object")
    return message


def encode(message: Mapping[str, Any]) -> bytes:
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
    """The two parts of a `sealed` memfd, which is closed. Raises MalformedMessageError for any other descriptor."""
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise MalformedMessageError("a descriptor that is not sealed")
        size = os.fstat(descriptor).st_size
        if size > MAX_BODY:
            raise MalformedMessageError(f"a body of {size} bytes")
        head, _, rest = os.pread(descriptor, size, 0).partition(b"\n")
    except OSError as error:
        raise MalformedMessageError(f"a descriptor of another kind: {error.strerror}") from error
    finally:
        os.close(descriptor)
    return head, rest
