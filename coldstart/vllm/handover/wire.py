"""Protocol that transfers KV blocks over TCP, layer by layer, with authentication and size limits.

The source sends a random nonce. The target sends its query, which contains another one, and a MAC of the nonce and the
query. For each layer, the source sends a header, the blocks, and a MAC of the query's MAC, the header and the blocks. An
empty header ends the transfer. The key of all MACs is the secret of the pin, so a client without the secret receives no
blocks, and changed bytes are detected before they reach the KV cache. Both nonces make a recorded transfer useless.

If both servers use NIXL, the header states where the source has staged the blocks, and a MAC of the query's MAC and the header
follows. The target reads the blocks with NIXL (staging.py) and sends one byte, after which the source sends the MAC of the
blocks. If that fails, the target continues over TCP.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import inf
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from coldstart.vllm.handover.staging import Data, StagedLayer, Staging, StagingError, log, reserve

NONCE, MAC, READ_DONE = 16, 32, b"R"
MAX_HEADER_BYTES = 1 << 16
MAX_CONNECTIONS = 16
CONNECT_S, QUERY_S, IDLE_S = 5.0, 5.0, 20.0


class TransferError(Exception):
    """Error for a failed KV transfer: the other server disconnected or sent invalid data."""


class BlockQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Query for at most `count` blocks of `pin` after the first `skip`, for each of the `layers` that the source has.

    If `nixl` is True, the source can stage the layers instead of sending them. `nonce` differs for each transfer.
    """

    pin: str
    skip: int
    count: int
    layers: tuple[str, ...]
    nixl: bool = False
    nonce: str = ""


class LayerHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Header of the layer `name` of `size` bytes, which follow unless they are `staged`."""

    name: str
    size: int
    staged: StagedLayer | None = None


Layers = Iterator[tuple[str, Data]]
FindSecret = Callable[[str], str | None]
"""Function that returns the secret of a pin, or None if the pin is unknown or has ended. It may wait for a few seconds."""


class DataPort:
    """Listening socket on a free port of `host`, which serves at most 16 connections with one thread each.

    `read_layers` yields the name and bytes of each queried layer. With `staging`, targets that ask for it use NIXL.
    """

    def __init__(
        self,
        host: str,
        find_secret: FindSecret,
        read_layers: Callable[[BlockQuery], Layers],
        staging: Staging | None = None,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=MAX_CONNECTIONS)
        self.address: tuple[str, int] = host, self._listener.getsockname()[1]
        self._find_secret, self._read, self._staging = find_secret, read_layers, staging
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
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
            with connection, suppress(OSError, TransferError, StagingError):
                self._answer(connection)
        finally:
            self._slots.release()

    def _answer(self, connection: socket.socket) -> None:
        nonce = secrets.token_bytes(NONCE)
        connection.settimeout(QUERY_S)
        connection.sendall(nonce)
        deadline = time.monotonic() + QUERY_S
        raw = _receive_header(connection, deadline)
        mac = _receive(connection, MAC, deadline)
        query = _decode(raw, BlockQuery)
        secret = self._find_secret(query.pin)
        if secret is None or not hmac.compare_digest(mac, _mac(secret, nonce, raw)):
            return
        connection.settimeout(IDLE_S)
        with reserve(self._staging if query.nixl else None) as staging:
            for name, data in self._read(query):
                staged = staging.write(data) if staging else None
                header = msgspec.json.encode(LayerHeader(name, len(data), staged))
                connection.sendall(len(header).to_bytes(4, "big") + header)
                if staging and staged:
                    connection.sendall(_mac(secret, mac, header))
                    staging.wait_for_target(connection)
                    _receive(connection, len(READ_DONE))
                else:
                    connection.sendall(data)
                connection.sendall(_mac(secret, mac, header, data))
        connection.sendall(bytes(4))


GetSize = Callable[[str], int]


def fetch_layers(
    address: tuple[str, int],
    secret: str,
    query: BlockQuery,
    get_size: GetSize,
    staging: Staging | None = None,
) -> Layers:
    """Yield the name and the bytes of each queried layer that the source at `address` has.

    `get_size` returns the expected size of a layer in bytes, and raises KeyError if the layer is unknown. With `staging`,
    layers that the source stages are read with NIXL. If that fails, they are fetched over TCP.

    Raises:
        TransferError: The source disconnects, sends nothing for 20 seconds, or sends invalid data.
    """
    missing = set(query.layers)
    with reserve(staging) as reserved:
        if reserved is not None:
            try:
                for name, data in _fetch(address, secret, replace(query, nixl=True), get_size, reserved):
                    missing.discard(name)
                    yield name, data
            except StagingError as error:
                reserved.failures += 1
                log.warning("NIXL transfer failed, TCP continues it: %s", error)
            else:
                return
    yield from _fetch(address, secret, replace(query, layers=tuple(missing)), get_size, None)


def _fetch(
    address: tuple[str, int], secret: str, query: BlockQuery, get_size: GetSize, staging: Staging | None
) -> Layers:
    """Fetch layers through one connection. Raises StagingError for failures that TCP can repair, else TransferError."""
    try:
        with socket.create_connection(address, CONNECT_S) as connection:
            connection.settimeout(IDLE_S)
            nonce = _receive(connection, NONCE)
            raw = msgspec.json.encode(replace(query, nonce=secrets.token_hex(NONCE)))
            session = _mac(secret, nonce, raw)
            connection.sendall(len(raw).to_bytes(4, "big") + raw + session)
            while header := _receive_header(connection):
                layer = _decode(header, LayerHeader)
                expected = get_size(layer.name)
                if layer.size != expected:
                    raise TransferError(f"layer {layer.name} has {layer.size} bytes, expected {expected}")
                if layer.staged is None:
                    data = _receive(connection, layer.size)
                elif staging is None or not hmac.compare_digest(
                    _receive(connection, MAC), _mac(secret, session, header)
                ):
                    raise TransferError(f"the source sent an invalid header for layer {layer.name}")
                else:
                    data = staging.read(layer.staged, layer.size, connection)
                    connection.sendall(READ_DONE)
                mac = _receive(connection, MAC)
                if not hmac.compare_digest(mac, _mac(secret, session, header, data)):
                    error = TransferError if layer.staged is None else StagingError
                    raise error(f"the bytes of layer {layer.name} do not match their MAC")
                yield layer.name, data
    except KeyError as error:
        raise TransferError(f"the source sent a layer that this server does not have: {error}") from error
    except OSError as error:  # includes TimeoutError
        raise TransferError(f"cannot fetch KV: {str(error) or type(error).__name__}") from error


T = TypeVar("T")


def _decode(raw: bytes | bytearray, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except ValueError as error:  # invalid JSON, fields or UTF-8
        raise TransferError(f"cannot decode a header of a KV transfer: {error}") from error


def _receive_header(connection: socket.socket, deadline: float = inf) -> bytearray:
    size = int.from_bytes(_receive(connection, 4, deadline), "big")
    if size > MAX_HEADER_BYTES:
        raise TransferError(
            f"a header of a KV transfer has {size} bytes; the limit is {MAX_HEADER_BYTES} bytes"
        )
    return _receive(connection, size, deadline)


def _receive(connection: socket.socket, size: int, deadline: float = inf) -> bytearray:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        # The time limit of the socket begins again with each byte.
        if time.monotonic() > deadline:
            raise TransferError("the other server did not send its query in time")
        count = connection.recv_into(rest)
        if not count:
            raise TransferError("the other server disconnected during the KV transfer")
        rest = rest[count:]
    return data


def _mac(secret: str, *parts: Data) -> bytes:
    # SHA-256 has dedicated CPU instructions, and takes half the CPU time of BLAKE2b.
    digest = hmac.new(bytes.fromhex(secret), digestmod="sha256")
    for part in parts:
        digest.update(part)
    return digest.digest()
