"""A threaded HTTP/1.1 file server for tests: ranges, one shared rate, faults, exact accounting.

Invariant: every body byte that the kernel took from this server is in exactly one entry of `sent`, also when
the connection broke midway. All connections together never exceed `rate` bytes/s by more than one burst.
S3 clients in path style (unsigned) find the bucket `b` in the folder `b` of the directory.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from support.range_settings import Bucket, Sent, Settings

HOST = "127.0.0.1"
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class RangeServer:
    """The files below `directory` on a port of `host` that stays the same through `down` and `up`."""

    def __init__(
        self, directory: Path, rate: float | None = None, port: int = 0, *, host: str = HOST
    ) -> None:
        self.directory, self.settings, self.host = directory.resolve(), Settings(rate), host
        self.bucket, self.lock = Bucket(self.settings), threading.Condition()
        # Bound all the time, so that no other process takes the port while this server is down.
        self._reserved = _bound(host, port)
        self._port, self._sent = int(self._reserved.getsockname()[1]), list[Sent]()
        self._listener: _Listener | None = None
        self.up()

    @property
    def url(self) -> str:
        """Return the base of every file's URL, without a trailing slash."""
        return f"http://{self.host}:{self._port}"

    @property
    def sent(self) -> list[Sent]:
        """Return all bodies so far, in the order in which they ended."""
        with self.lock:
            return list(self._sent)

    def account(self, entry: Sent) -> None:
        """Add an entry."""
        with self.lock:
            self._sent.append(entry)

    def reset(self) -> None:
        """Clear the record of sent bodies."""
        with self.lock:
            self._sent.clear()

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


def _bound(host: str, port: int) -> socket.socket:
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, port))
    return reserved


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, owner: RangeServer, port: int) -> None:
        self.owner, self.connections = owner, set[socket.socket]()
        super().__init__((owner.host, port), _Handler)
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

    def setup(self) -> None:
        super().setup()
        self.owner = self.server.owner

    def handle(self) -> None:
        # A client that disconnects is not an error of the server.
        with suppress(OSError):
            super().handle()

    def finish(self) -> None:
        with self.owner.lock:
            self.server.connections.discard(self.request)
            self.owner.lock.notify_all()
        with suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        settings, asked = self.owner.settings, urlsplit(self.path)
        time.sleep(settings.latency_s)
        if settings.take_one("refusals"):
            return self._head(settings.refusal, 0)
        path = (self.owner.directory / unquote(asked.path).lstrip("/")).resolve()
        if not path.is_relative_to(self.owner.directory):
            return self._head(404, 0)
        if "list-type" in (query := parse_qs(asked.query)):
            return self._list(path, query)
        return self._file(path, body) if path.is_file() else self._head(404, 0)

    def _file(self, path: Path, body: bool) -> None:
        found, wanted = path.stat(), None if self.owner.settings.ignore_range else self.headers["Range"]
        span = _span(wanted, found.st_size)
        if span is None:
            return self._head(416, 0, {"Content-Range": f"bytes */{found.st_size}"})
        first, last = span
        extra = {
            "Accept-Ranges": "bytes",
            "ETag": f'"{found.st_size:x}-{found.st_mtime_ns:x}{self.owner.settings.version}"',
            "Last-Modified": formatdate(found.st_mtime, usegmt=True),
        }
        partial = wanted is not None and _RANGE.fullmatch(wanted) is not None
        if partial:
            extra["Content-Range"] = f"bytes {first}-{last}/{found.st_size}"
        self._head(206 if partial else 200, last + 1 - first, extra)
        return self._body(path, first, last) if body else None

    def _head(self, status: int, length: int, extra: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **(extra or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def _body(self, path: Path, first: int, last: int) -> None:
        name, settings = str(path.relative_to(self.owner.directory)), self.owner.settings
        flips, end = settings.flipped(name, first, last), last + 1
        if end - first > settings.cut_after and settings.take_one("cuts"):
            end, self.close_connection = first + settings.cut_after, True
        with path.open("rb") as file:
            at = self._copy(file.fileno(), first, end - 1, flips)
            # Counted before the last byte is sent: a client with the complete body finds it counted.
            entry = Sent(name, first, last, at - first + (at == end - 1), self.headers["User-Agent"] or "")
            self.owner.account(entry)
            if at == end - 1 and self._copy(file.fileno(), at, end, flips) == at:
                entry.bytes -= 1

    def _copy(self, file: int, at: int, end: int, flips: list[int]) -> int:
        """Send the bytes from `at` to `end` and return the position reached."""
        with suppress(OSError):
            while at < end:
                count = min(self.owner.bucket.chunk, end - at)
                self.owner.bucket.take(count)
                at += self._send(file, at, count, flips)
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

    def _list(self, folder: Path, query: dict[str, list[str]]) -> None:
        prefix = query.get("prefix", [""])[0]
        files = sorted((str(p.relative_to(folder)), p) for p in folder.rglob("*") if p.is_file())
        rows = "".join(_row(key, p.stat()) for key, p in files if key.startswith(prefix))
        page = "<IsTruncated>false</IsTruncated>" + rows
        data = f'<?xml version="1.0"?><ListBucketResult>{page}</ListBucketResult>'.encode()
        self._head(200, len(data), {"Content-Type": "application/xml"})
        self.wfile.write(data)


def _row(key: str, found: os.stat_result) -> str:
    when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.st_mtime))
    tags = f"<LastModified>{when}</LastModified><ETag>&quot;{found.st_mtime_ns:x}&quot;</ETag>"
    return f"<Contents><Key>{escape(key)}</Key>{tags}<Size>{found.st_size}</Size></Contents>"


def _span(wanted: str | None, size: int) -> tuple[int, int] | None:
    """(first, last) of a Range header, all of the file without (a usable) one; None is unsatisfiable."""
    match = _RANGE.fullmatch(wanted or "")
    if match is None or match.group() == "bytes=-":
        return 0, size - 1
    first, last = match.groups()
    if not first:
        return max(0, size - int(last)), size - 1
    span = int(first), min(int(last or size), size - 1)
    return span if span[0] <= span[1] else None


@contextmanager
def serving(directory: Path, rate: float | None = None, port: int = 0) -> Iterator[RangeServer]:
    """Run a server in this process until the block ends."""
    server = RangeServer(directory, rate, port)
    try:
        yield server
    finally:
        server.close()


def main(directory: str, host: str, port: str) -> None:
    """Print the URL and serve until SIGTERM."""
    server = RangeServer(Path(directory), port=int(port), host=host)
    print(server.url, flush=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    main(*sys.argv[1:])
