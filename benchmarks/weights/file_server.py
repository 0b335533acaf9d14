"""Serve a directory over HTTP from a separate process, with ranges and one rate for all connections.

    python -m benchmarks.weights.file_server DIRECTORY

The process prints its URL. POST sets {"rate": bytes per second or null} and clears the count of sent bytes;
GET /sent returns that count.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO

from benchmarks.common import ROOT

HOST, PIECE = "127.0.0.1", 256 << 10


@dataclass(frozen=True)
class Remote:
    """The server as its client sees it."""

    url: str

    def set_rate(self, rate: float | None) -> None:
        """Limit all connections together to `rate` bytes per second and clear the count of sent bytes."""
        urllib.request.urlopen(self.url, json.dumps({"rate": rate}).encode()).close()

    def sent_bytes(self) -> int:
        """Return the body bytes sent since the last `set_rate`."""
        with urllib.request.urlopen(f"{self.url}/sent") as reply:
            return int(reply.read())


@dataclass
class Shared:
    """State of all connections: the rate, the time at which the next byte may be sent, the bytes sent."""

    directory: Path
    rate: float | None = None
    free_at: float = 0.0
    sent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def set_rate(self, rate: float | None) -> None:
        with self.lock:
            self.rate, self.free_at, self.sent = rate, time.monotonic(), 0

    def take(self, count: int) -> None:
        """Wait until `count` bytes may be sent."""
        with self.lock:
            now = time.monotonic()
            self.free_at = max(self.free_at, now) + (count / self.rate if self.rate else 0.0)
            wait = self.free_at - now
        if wait > 0:
            time.sleep(wait)

    def count(self, count: int) -> None:
        with self.lock:
            self.sent += count


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    shared: Shared

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_POST(self) -> None:
        self.shared.set_rate(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["rate"])
        self._head(200, 0)

    def do_HEAD(self) -> None:
        self._head(200, self._file().stat().st_size)

    def do_GET(self) -> None:
        if self.path == "/sent":
            body = str(self.shared.sent).encode()
            self._head(200, len(body))
            self.wfile.write(body)
        elif self._file().is_file():
            self._send(self._file())
        else:
            self._head(404, 0)

    def _file(self) -> Path:
        return self.shared.directory / self.path.lstrip("/")

    def _send(self, file: Path) -> None:
        size, asked = file.stat().st_size, re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(asked[1]) if asked else 0
        last = min(int(asked[2]), size - 1) if asked and asked[2] else size - 1
        extra = {"Content-Range": f"bytes {first}-{last}/{size}"} if asked else {}
        self._head(206 if asked else 200, last - first + 1, extra)
        with file.open("rb") as source:
            source.seek(first)
            self._copy(source, last - first + 1)

    def _copy(self, source: BinaryIO, left: int) -> None:
        while left:
            piece = source.read(min(PIECE, left))
            self.shared.take(len(piece))
            self.wfile.write(piece)
            self.shared.count(len(piece))
            left -= len(piece)

    def _head(self, status: int, length: int, extra: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), "Accept-Ranges": "bytes", **(extra or {})}.items():
            self.send_header(name, value)
        self.end_headers()


@contextmanager
def running(directory: Path) -> Iterator[Remote]:
    """Run a server for the block."""
    command = [sys.executable, "-m", "benchmarks.weights.file_server", str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        yield Remote(process.stdout.readline().strip())
    finally:
        process.terminate()
        process.communicate()


def main(directory: str) -> None:
    """Serve until a signal ends the process."""
    Handler.shared = Shared(Path(directory).resolve())
    server = ThreadingHTTPServer((HOST, 0), Handler)
    print(f"http://{HOST}:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
