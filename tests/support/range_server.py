"""A threaded HTTP/1.1 file server for tests: ranges, one shared rate, wrong bytes, exact accounting.

Invariant: every body byte that the kernel took from this server is in exactly one entry of `sent`, also when
the connection broke midway. All connections together never exceed `rate` bytes/s by more than one burst.
S3 clients in path style (unsigned) find the bucket `b` in the folder `b` of the directory.
"""

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

HOST = "127.0.0.1"
FOREVER = -1
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_UNLIMITED_CHUNK, _BURST_S = 4 << 20, 0.01


@dataclass
class Sent:
    """One response body: the first byte of the requested range, and the number of bytes sent."""

    file: str
    first: int
    bytes: int


@dataclass
class Settings:
    """Settings that take effect with the next response (`rate`: at once)."""

    rate: float | None = None
    """Bytes per second of all connections together; None is unlimited."""
    flips: list[tuple[str, int, int]] = field(default_factory=list)
    """(file, offset, times): the byte arrives inverted in the next `times` responses that hold it; FOREVER does not end."""


class RangeServer:
    """The files below `directory` on a port that stays the same through `down` and `up`."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.settings = directory.resolve(), Settings()
        self.lock, self._due_s = threading.Condition(), 0.0
        # Bound all the time, so that no other process takes the port while this server is down.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind((HOST, 0))
        self._port, self._sent = int(self._reserved.getsockname()[1]), list[Sent]()
        self._listener: _Listener | None = None
        self.up()

    @property
    def url(self) -> str:
        """Return the base of every file's URL, without a trailing slash."""
        return f"http://{HOST}:{self._port}"

    @property
    def sent(self) -> list[Sent]:
        """Return all bodies so far, in the order in which they ended."""
        with self.lock:
            return list(self._sent)

    def total(self, file: str | None = None) -> int:
        """Return the sent bytes of `file` or of all files."""
        return sum(entry.bytes for entry in self.sent if file in (None, entry.file))

    def repeated(self, file: str) -> int:
        """Return the number of bytes of `file` that were sent more than once."""
        end = again = 0
        for first, past in sorted((e.first, e.first + e.bytes) for e in self.sent if e.file == file):
            again += max(0, min(end, past) - first)
            end = max(end, past)
        return again

    def take_piece(self, count: int) -> int:
        """Block until a piece of at most `count` bytes may be sent, in the order of the calls; return its size."""
        if (rate := self.settings.rate) is None:
            return min(count, _UNLIMITED_CHUNK)
        count = min(count, max(4096, min(1 << 20, int(rate / 200))))
        with self.lock:
            now_s = time.monotonic()
            self._due_s = max(self._due_s, now_s - _BURST_S) + count / rate
            wait_s = self._due_s - now_s
        time.sleep(max(0.0, wait_s))
        return count

    def flipped(self, file: str, first: int, last: int) -> list[int]:
        """Return the offsets to invert in a response of bytes first..last of `file`; count them down."""
        with self.lock:
            hits = [f for f in self.settings.flips if f[0] == file and first <= f[1] <= last and f[2]]
            rest = [f for f in self.settings.flips if f not in hits]
            self.settings.flips = rest + [(f, o, times - (times > 0)) for f, o, times in hits]
        return [offset for _, offset, _ in hits]

    def down(self) -> None:
        """Close all connections and refuse new ones. Does nothing while down."""
        if self._listener is not None:
            self._listener.die()
            self._listener = None

    def up(self) -> None:
        """Listen again, on the same port. Does nothing while up."""
        if self._listener is None:
            self._listener = _Listener(self, self._port)

    def close(self) -> None:
        """Stop and release the port."""
        self.down()
        self._reserved.close()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, owner: RangeServer, port: int) -> None:
        self.owner, self.connections = owner, set[socket.socket]()
        super().__init__((HOST, port), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        # Before its thread runs: a connection accepted in the moment of dying must not survive it.
        with self.owner.lock:
            self.connections.add(request)
        super().process_request(request, client_address)

    def die(self) -> None:
        self.shutdown()
        self.server_close()
        with self.owner.lock:
            for connection in self.connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            # What each had sent is counted by its own thread.
            self.owner.lock.wait_for(lambda: not self.connections, timeout=5)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Listener

    def handle(self) -> None:
        # A client that disconnects is not an error of the server.
        with suppress(OSError):
            super().handle()

    def finish(self) -> None:
        with self.server.owner.lock:
            self.server.connections.discard(self.request)
            self.server.owner.lock.notify_all()
        with suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""

    def do_GET(self) -> None:
        root, wanted = self.server.owner.directory, _RANGE.fullmatch(self.headers["Range"] or "")
        path = (root / unquote(urlsplit(self.path).path).lstrip("/")).resolve()
        if not path.is_relative_to(root) or not path.is_file() or wanted is None:
            return self.send_error(404)
        found, first = path.stat(), int(wanted[1])
        last = min(int(wanted[2]), found.st_size - 1)
        self.send_response(206)
        for name, value in {
            "Content-Length": str(last + 1 - first),
            "Content-Range": f"bytes {first}-{last}/{found.st_size}",
            "ETag": f'"{found.st_size:x}-{found.st_mtime_ns:x}"',
            "Last-Modified": formatdate(found.st_mtime, usegmt=True),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        return self._body(path, first, last)

    def _body(self, path: Path, first: int, last: int) -> None:
        owner = self.server.owner
        name = str(path.relative_to(owner.directory))
        flips = owner.flipped(name, first, last)
        with path.open("rb") as file:
            at = self._copy(file.fileno(), first, last, flips)
            # Counted before the last byte is sent: a client with the complete body finds it counted.
            entry = Sent(name, first, at - first + (at == last))
            with owner.lock:
                owner._sent.append(entry)
            if at == last and self._copy(file.fileno(), at, last + 1, flips) == at:
                entry.bytes -= 1

    def _copy(self, file: int, at: int, end: int, flips: list[int]) -> int:
        """Send the bytes from `at` to `end` and return the position reached."""
        with suppress(OSError):
            while at < end:
                at += self._send(file, at, self.server.owner.take_piece(end - at), flips)
        self.close_connection |= at < end
        return at

    def _send(self, file: int, at: int, count: int, flips: list[int]) -> int:
        within = [offset - at for offset in flips if at <= offset < at + count]
        if not within:
            return os.sendfile(self.connection.fileno(), file, at, count)
        data = bytearray(os.pread(file, count, at))
        for position in within:
            data[position] ^= 0xFF
        return self.connection.send(data)


@contextmanager
def run_server(directory: Path, rate: float | None = None) -> Iterator[RangeServer]:
    """Run a server in this process until the block ends."""
    server = RangeServer(directory)
    server.settings.rate = rate
    try:
        yield server
    finally:
        server.close()
