"""Protocol between coldstart's processes on one machine: one JSON object per line over a unix stream socket.

File descriptors travel with a line. Large data travels as a sealed memfd, so that the receiver never waits for a slow
sender and no process changes the data afterwards. An open connection is a lease: its end shows that the other process ended.
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
# A client that connects and sends nothing must not block a server's other clients or its signals.
PATIENCE_S = 5.0
_MAX_DESCRIPTORS = 8
_RIGHTS = socket.CMSG_SPACE(4 * _MAX_DESCRIPTORS)
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class MalformedMessageError(PeerError):
    """The other process sent a message that violates the protocol."""


class Channel:
    """One end of a connection that sends and receives complete messages with descriptors. A context manager."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.descriptors: deque[int] = deque()
        self._pending = b""

    def fileno(self) -> int:
        """Return the socket's descriptor, for selectors."""
        return self.socket.fileno()

    def send(self, message: Mapping[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        """Send one message, blocking, and the descriptors with its first byte. Raises OSError."""
        line = encode(message)
        sent = send_some(self.socket, line, descriptors)
        if sent < len(line):  # sending zero bytes would fail if the peer has closed since
            self.socket.sendall(memoryview(line)[sent:])

    def receive(self, limit: int | None = LINE) -> list[dict[str, Any]] | None:
        """Return the messages that one read completes, None at the end of the connection.

        Raises:
            MalformedMessageError: A line exceeds `limit` bytes or is not a JSON object, or there are too many descriptors.
        """
        try:
            # socket.recv_fds would drop the flag that keeps child processes from inheriting the descriptors.
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
            raise MalformedMessageError(f"a line exceeds {limit} bytes")
        return list(map(_object, lines))

    def request(self) -> dict[str, Any]:
        """Return the single message that a client sends first, within PATIENCE_S seconds in total.

        Raises:
            MalformedMessageError: The message is truncated, longer than MAX_REQUEST bytes, too slow, or followed by another.
        """
        deadline = time.monotonic() + PATIENCE_S
        while select.select([self.socket], [], [], max(0.0, deadline - time.monotonic()))[0]:
            messages = self.receive(MAX_REQUEST)
            if messages is None:
                raise MalformedMessageError("the request is truncated")
            if len(messages) > 1 or (messages and self._pending):
                raise MalformedMessageError("more than one request")
            if messages:
                return messages[0]
        raise MalformedMessageError(f"no request within {PATIENCE_S:g} s")

    def replies(self) -> Iterator[dict[str, Any]]:
        """Yield messages until the connection ends, blocking."""
        while (messages := self.receive(None)) is not None:
            yield from messages

    def take(self) -> int:
        """Remove and return the oldest received descriptor, now owned by the caller. Raises MalformedMessageError."""
        if not self.descriptors:
            raise MalformedMessageError("a descriptor is missing")
        return self.descriptors.popleft()

    def close(self) -> None:
        """Close the connection and all descriptors that were not taken."""
        self.close_descriptors()
        self.socket.close()

    def close_descriptors(self) -> None:
        """Close the descriptors that were not taken."""
        while self.descriptors:
            os.close(self.descriptors.popleft())

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def send_some(connection: socket.socket, data: bytes | bytearray, descriptors: tuple[int, ...] = ()) -> int:
    """Send as many bytes as the socket accepts, the descriptors with the first one. Return the number. Raises as sendmsg."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    return connection.sendmsg([data], rights)


def _object(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MalformedMessageError(f"a line is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise MalformedMessageError("a line is not a JSON object")
    return message


def encode(message: Mapping[str, Any]) -> bytes:
    """Encode a message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def sealed(*parts: bytes) -> int:
    """Return an immutable memfd that contains the parts, separated by newlines. The caller closes it."""
    descriptor = os.memfd_create("coldstart-request", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(b"\n".join(parts))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_document(descriptor: int) -> dict[str, Any]:
    """Read the JSON object in a `sealed` memfd and close it. Raises MalformedMessageError for any other descriptor."""
    return _object(body(descriptor)[0])


def body(descriptor: int) -> tuple[bytes, bytes]:
    """Read the two parts of a `sealed` memfd and close it. Raises MalformedMessageError for any other descriptor."""
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise MalformedMessageError("the descriptor is not sealed")
        size = os.fstat(descriptor).st_size
        if size > MAX_BODY:
            raise MalformedMessageError(f"the body is too large: {size} bytes")
        head, _, rest = os.pread(descriptor, size, 0).partition(b"\n")
    except OSError as error:
        raise MalformedMessageError(f"the descriptor is not a memfd: {error.strerror}") from error
    finally:
        os.close(descriptor)
    return head, rest
