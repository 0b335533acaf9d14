"""TCP server that answers HTTP requests with any bytes at any speed and records the requests."""

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

HEAD_END = b"\r\n\r\n"
# First byte of a TLS handshake; closing the connection tells the client at once that this is not a TLS server.
_TLS = b"\x16"


@dataclass(frozen=True)
class Asked:
    """One request: parts of its first line, headers with lower-case names, and all bytes."""

    method: str
    path: str
    headers: Mapping[str, str]
    raw: bytes


Behave = Callable[[socket.socket, Asked], None]


@dataclass
class RawServer:
    """Address of the server and the requests so far."""

    host: str
    port: int
    asked: list[Asked] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Return HOST:PORT."""
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Return http://HOST:PORT."""
        return f"http://{self.address}"

    @property
    def heard(self) -> bytes:
        """Return all received bytes."""
        return b"".join(one.raw for one in list(self.asked))


@contextmanager
def answering(
    behave: Behave, host: str = "127.0.0.1", context: ssl.SSLContext | None = None
) -> Iterator[RawServer]:
    """Serve until the block ends, over TLS with `context`.

    Connections close after each answer unless `behave` leaves Content-Length right.
    """
    listener = socket.create_server((host, 0), backlog=64)
    server = RawServer(host, listener.getsockname()[1])
    threading.Thread(target=_accept, args=(listener, behave, server, context), daemon=True).start()
    try:
        yield server
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def _accept(
    listener: socket.socket, behave: Behave, server: RawServer, context: ssl.SSLContext | None
) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_serve, args=(connection, behave, server, context), daemon=True).start()


def _serve(
    connection: socket.socket, behave: Behave, server: RawServer, context: ssl.SSLContext | None
) -> None:
    with suppress(OSError, ValueError), connection:
        connection.settimeout(60)
        if context is not None:
            connection = context.wrap_socket(connection, server_side=True)
        while (asked := _request(connection)) is not None:
            server.asked.append(asked)
            behave(connection, asked)


def _request(connection: socket.socket) -> Asked | None:
    data = b""
    while HEAD_END not in data:
        if not (more := connection.recv(65536)):
            return None
        data += more
        if data[:1] == _TLS:
            return None
    head, _, rest = data.partition(HEAD_END)
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = int(headers.get("content-length", "0"))
    while len(rest) < length and (more := connection.recv(65536)):
        data, rest = data + more, rest + more
    method, path, _ = first.split(" ", 2)
    return Asked(method, path, headers, data)


def answer(
    connection: socket.socket, status: int, headers: Mapping[str, str] | None = None, body: bytes = b""
) -> None:
    """Send a valid response."""
    lines = {"Content-Length": str(len(body)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    connection.sendall(f"HTTP/1.1 {status} Said\r\n{head}\r\n".encode("latin-1") + body)


def say(connection: socket.socket, value: object, status: int = 200) -> None:
    """Send a JSON response."""
    answer(connection, status, {"Content-Type": "application/json"}, json.dumps(value).encode())


def challenge(connection: socket.socket, asked: Asked, path: str, more: str = "") -> None:
    """Ask for a Bearer token of the server itself."""
    realm = f'Bearer realm="http://{asked.headers["host"]}{path}"{more}'
    answer(connection, 401, {"WWW-Authenticate": realm})


def dribble(connection: socket.socket, data: bytes, every_s: float) -> None:
    """Send one byte at a time and repeat the last byte without an end."""
    position = 0
    while True:
        connection.sendall(data[min(position, len(data) - 1) :][:1])
        position += 1
        time.sleep(every_s)


def flood(connection: socket.socket, block: bytes, total: int) -> None:
    """Send `block` repeatedly, up to `total` bytes."""
    while total > 0:
        connection.sendall(block[:total])
        total -= len(block)
