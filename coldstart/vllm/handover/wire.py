"""Transfer of KV blocks over TCP, layer by layer: authenticated, verified and bounded.

The source sends a random nonce. The target answers with its query and a MAC of nonce and query. Each layer follows as
a header, its blocks, and a MAC of nonce, header and blocks; an empty header ends the transfer. All MACs have
the secret of the pin as their key, so a stranger gets nothing, and a changed byte is found before it reaches
the KV cache.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

import msgspec

NONCE, MAC = 16, 32
MOST_HEADER = 1 << 16
MOST_CONNECTIONS = 16
CONNECT_S, QUERY_S, IDLE_S = 5.0, 5.0, 20.0


class TransferError(Exception):
    """The other server disconnected, or what it sent is not what was asked for."""


class Query(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The blocks of `pin`, without the first `skip`, at most `count`, of those of the `layers` that the source has."""

    pin: str
    skip: int
    count: int
    layers: tuple[str, ...]


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`size` bytes of the layer `name` follow."""

    name: str
    size: int


Layers = Iterator[tuple[str, bytes | bytearray]]
FindSecret = Callable[[str], str | None]
"""Return the secret of a pin, or None if the pin is unknown or its lease has ended; may wait a few seconds."""


class DataPort:
    """Listener on a free port of the address `host`, one thread for each of at most 16 connections.

    `read` yields the layers of a query: name and bytes.
    """

    def __init__(self, host: str, find_secret: FindSecret, read: Callable[[Query], Layers]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=MOST_CONNECTIONS)
        self.address: tuple[str, int] = host, self._listener.getsockname()[1]
        self._find_secret, self._read = find_secret, read
        self._slots = threading.BoundedSemaphore(MOST_CONNECTIONS)
        threading.Thread(target=self._accept, name="kv-handover", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            self._slots.acquire()
            try:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError):  # closed, or no descriptor or thread is free
                self._slots.release()
                if self._listener.fileno() < 0:
                    return

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, suppress(OSError, TransferError):
                self._answer(connection)
        finally:
            self._slots.release()

    def _answer(self, connection: socket.socket) -> None:
        nonce = secrets.token_bytes(NONCE)
        connection.settimeout(QUERY_S)
        connection.sendall(nonce)
        raw = _receive_header(connection)
        mac = _receive(connection, MAC)
        query = _decode(raw, Query)
        secret = self._find_secret(query.pin)
        if secret is None or not hmac.compare_digest(mac, _mac(secret, nonce, raw)):
            return
        connection.settimeout(IDLE_S)
        for name, data in self._read(query):
            header = msgspec.json.encode(Layer(name, len(data)))
            connection.sendall(len(header).to_bytes(4, "big") + header)
            connection.sendall(data)
            connection.sendall(_mac(secret, nonce, header, data))
        connection.sendall(bytes(4))


def fetch(address: tuple[str, int], secret: str, query: Query, size: Callable[[str], int]) -> Layers:
    """Yield name and bytes of each layer that the source at `address` has.

    `size` returns the number of bytes that a layer must have, and raises KeyError for an unknown layer.

    Raises:
        TransferError: The source disconnects, is silent for 20 s, or sends something else.
    """
    try:
        with socket.create_connection(address, CONNECT_S) as connection:
            connection.settimeout(IDLE_S)
            nonce = _receive(connection, NONCE)
            raw = msgspec.json.encode(query)
            connection.sendall(len(raw).to_bytes(4, "big") + raw + _mac(secret, nonce, raw))
            while header := _receive_header(connection):
                layer = _decode(header, Layer)
                if layer.size != size(layer.name):
                    raise TransferError(f"layer {layer.name} has {layer.size} bytes, not {size(layer.name)}")
                data = _receive(connection, layer.size)
                mac = _receive(connection, MAC)
                if not hmac.compare_digest(mac, _mac(secret, nonce, header, data)):
                    raise TransferError(f"the bytes of layer {layer.name} were changed on their way")
                yield layer.name, data
    except KeyError as error:
        raise TransferError(f"this server has no layer {error}") from error
    except OSError as error:  # includes TimeoutError
        raise TransferError(str(error) or type(error).__name__) from error


T = TypeVar("T")


def _decode(raw: bytes | bytearray, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except ValueError as error:  # of msgspec, or of bytes that are no text
        raise TransferError(f"a header cannot be decoded: {error}") from error


def _receive_header(connection: socket.socket) -> bytearray:
    size = int.from_bytes(_receive(connection, 4), "big")
    if size > MOST_HEADER:
        raise TransferError(f"a header has {size} bytes, more than {MOST_HEADER}")
    return _receive(connection, size)


def _receive(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        count = connection.recv_into(rest)
        if not count:
            raise TransferError("the other server disconnected")
        rest = rest[count:]
    return data


def _mac(secret: str, *parts: bytes | bytearray) -> bytes:
    # SHA-256 has instructions of its own, and takes half the CPU time of BLAKE2b.
    digest = hmac.new(bytes.fromhex(secret), digestmod="sha256")
    for part in parts:
        digest.update(part)
    return digest.digest()
