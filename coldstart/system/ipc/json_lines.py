"""Protocol between coldstart processes on one machine: one JSON object per line over a Unix stream socket.

Lines can carry file descriptors. Large data is sent as a sealed memfd, so that the receiver never waits for a slow sender
and no process can change the data afterwards. An open connection is a lease: it closes when the other process exits. Only
the standard library is imported, because some clients run for only a few milliseconds.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

from coldstart.system.ipc.peers import PeerError, await_readable

MAX_LINE = 1 << 16
MAX_REQUEST = 1 << 20
MAX_BODY = 128 << 20
# A client that connects and sends nothing must not block a server's other clients or its signals.
PATIENCE_S = 5.0
_MAX_DESCRIPTORS = 8
_RIGHTS = socket.CMSG_SPACE(4 * _MAX_DESCRIPTORS)
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class MalformedMessageError(PeerError):
    """Error for a message that violates the protocol."""


class Channel(AbstractContextManager["Channel"]):
    """Connection that sends and receives complete messages with file descriptors. It is a context manager."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.descriptors: deque[int] = deque()
        self._pending = b""

    def fileno(self) -> int:
        """Return the socket's descriptor, for selectors."""
        return self.socket.fileno()

    def send(self, message: Mapping[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        """Send one message, with `descriptors` attached to its first byte, and block until it is sent. Raises OSError."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        rights = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        )
        sent = self.socket.sendmsg([line], rights)
        if sent < len(line):  # sending zero bytes would fail if the peer has closed since
            self.socket.sendall(memoryview(line)[sent:])

    def try_send(self, message: Mapping[str, Any]) -> None:
        """Send a message. Do nothing if the peer has disconnected, which callers notice when they receive."""
        with suppress(OSError):
            self.send(message)

    def receive(self, limit: int | None = MAX_LINE) -> list[dict[str, Any]] | None:
        """Read once and return the messages that are now complete, or None at the end of the connection.

        Raises:
            MalformedMessageError: A line exceeds `limit` bytes or is not a JSON object, or there are too many
                descriptors.
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
            raise MalformedMessageError("received too many file descriptors with one message")
        *lines, self._pending = (self._pending + data).split(b"\n")
        if limit is not None and max(map(len, [*lines, self._pending])) > limit:
            raise MalformedMessageError(f"received a line of more than {limit} bytes")
        return list(map(_parse_object, lines))

    def receive_request(self) -> dict[str, Any]:
        """Return the next request, which must arrive within PATIENCE_S seconds and without another message after it.

        Raises:
            MalformedMessageError: The request is truncated, longer than MAX_REQUEST bytes, not received in time, or
                followed by another message.
        """
        deadline = time.monotonic() + PATIENCE_S
        while await_readable(self.socket, timeout_s=max(0.0, deadline - time.monotonic())):
            messages = self.receive(MAX_REQUEST)
            if messages is None:
                raise MalformedMessageError("the received request is truncated")
            if len(messages) > 1 or (messages and self._pending):
                raise MalformedMessageError("received more than one request")
            if messages:
                return messages[0]
        raise MalformedMessageError(f"received no request within {PATIENCE_S:g} s")

    def iterate_replies(self) -> Iterator[dict[str, Any]]:
        """Yield messages until the connection ends. The iterator blocks until the next message arrives."""
        while (messages := self.receive(None)) is not None:
            yield from messages

    def take_descriptor(self) -> int:
        """Remove and return the oldest received descriptor, which the caller then owns.

        Raises MalformedMessageError if there is none.
        """
        if not self.descriptors:
            raise MalformedMessageError("received a message without the required file descriptor")
        return self.descriptors.popleft()

    def close(self) -> None:
        """Close the connection and all received descriptors that were not taken."""
        self.close_descriptors()
        self.socket.close()

    def close_descriptors(self) -> None:
        """Close all received descriptors that were not taken."""
        while self.descriptors:
            os.close(self.descriptors.popleft())

    def __exit__(self, *_: object) -> None:
        self.close()


def _parse_object(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MalformedMessageError(f"received a line that is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise MalformedMessageError("received a line that is not a JSON object")
    return message


def create_sealed_memfd(*parts: bytes) -> int:
    """Return the descriptor of an immutable memfd that contains `parts`, separated by newlines. The caller closes it."""
    descriptor = os.memfd_create("coldstart-request", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(b"\n".join(parts))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_sealed(descriptor: int) -> bool:
    """Return whether a descriptor is a memfd whose contents can no longer change."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:  # not a memfd
        return False


def read_document(descriptor: int) -> dict[str, Any]:
    """Read the JSON object in a sealed memfd, and close the memfd. Raises MalformedMessageError for any other descriptor."""
    return _parse_object(read_body(descriptor)[0])


def read_body(descriptor: int) -> tuple[bytes, bytes]:
    """Read the two parts of a sealed memfd, and close the memfd. Raises MalformedMessageError for any other descriptor."""
    try:
        if not is_sealed(descriptor):
            raise MalformedMessageError("the received descriptor is not a sealed memfd")
        size = os.fstat(descriptor).st_size
        if size > MAX_BODY:
            raise MalformedMessageError(f"the received memfd has {size} bytes; the limit is {MAX_BODY} bytes")
        head, _, rest = os.pread(descriptor, size, 0).partition(b"\n")
    finally:
        os.close(descriptor)
    return head, rest
