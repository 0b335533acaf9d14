"""Handing a start over to a template process: one unix stream socket, one request, a few JSON lines back.

The client sends the plan and its three standard descriptors; the template answers {"pid": n} once it has forked the
server and {"exit": code} when the server ends. The connection is the server's lease: when the client goes, the server
goes. Standard library only, for a client that lives a few milliseconds.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_REQUEST = 1 << 20
# Whoever connects and says nothing must not keep a template from its other clients, nor from its signals.
PATIENCE_S = 5.0
_MAX_DESCRIPTORS = 8


class HandoffError(RuntimeError):
    """The other side is not there, is not ours, or speaks another language."""


def listen(path: Path) -> socket.socket:
    """A listening socket that only this user can reach (directory 0700, socket 0600)."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous = os.umask(0o177)
    try:
        server.bind(str(path))
    finally:
        os.umask(previous)
    server.listen(16)
    return server


def peer_uid(connection: socket.socket) -> int:
    """The user id of the process at the other end, as the kernel knows it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def connect(path: Path) -> socket.socket:
    """Connect to a template. Raises HandoffError when nobody, or another user, listens there."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        client.connect(str(path))
    except OSError as error:
        client.close()
        raise HandoffError(f"no template listens at {path}: {error.strerror}") from error
    if peer_uid(client) != os.getuid():
        client.close()
        raise HandoffError(f"the template at {path} belongs to another user")
    return client


def send(connection: socket.socket, request: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
    """Send one request: its length, its JSON, and with the first byte the open descriptors.

    Raises HandoffError when it cannot be sent.
    """
    body = json.dumps(request).encode()
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    try:
        connection.sendmsg([struct.pack("!I", len(body))], ancillary)
        connection.sendall(body)
    except OSError as error:
        raise HandoffError(f"the template does not take the request: {error.strerror}") from error


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive one request and its descriptors, which are the caller's to close.

    Raises HandoffError, holding no descriptor, on anything cut short, too large, too slow or no JSON object.
    """
    connection.settimeout(PATIENCE_S)
    descriptors: list[int] = []
    try:
        head, descriptors, _, _ = socket.recv_fds(connection, 4, _MAX_DESCRIPTORS)
        request = _object(connection, head)
        connection.settimeout(None)
    except BaseException as error:
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(error, ValueError | OSError):
            raise HandoffError(f"malformed request: {error}") from error
        raise
    return request, descriptors


def _object(connection: socket.socket, head: bytes) -> dict[str, Any]:
    if len(head) != 4 or (size := struct.unpack("!I", head)[0]) > MAX_REQUEST:
        raise HandoffError("malformed request")
    body = b""
    while len(body) < size:
        chunk = connection.recv(size - len(body))
        if not chunk:
            raise HandoffError("request cut short")
        body += chunk
    request = json.loads(body)
    if not isinstance(request, dict):
        raise HandoffError("malformed request: no JSON object")
    return request


def replies(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """The template's answers, one JSON object a line, until it closes the connection or is killed."""
    with connection.makefile("r") as lines, suppress(ConnectionResetError):
        for line in lines:
            yield json.loads(line)


def reply(connection: socket.socket, **message: Any) -> None:
    """Send one answer; a client that has gone is no error.

    The connection stays open: its end is what tells that the lease has ended.
    """
    with suppress(OSError):
        connection.sendall((json.dumps(message) + "\n").encode())
