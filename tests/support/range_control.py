"""A range server as a process of its own, switched and read over a control URL.

    python tests/support/range_control.py DIRECTORY [--rate BYTES_PER_S] [--port PORT]

prints one JSON line {"url": ..., "control": ...} and serves until it is ended. The control URL survives `down`:
GET gives {"sent": [...], "settings": {...}}; POST takes a JSON object of settings, or {"do": "down" | "up" | "reset"}.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.range_server import HOST, RangeServer
from support.range_settings import Sent


class Remote:
    """A range server in another process, as seen through its control URL."""

    def __init__(self, url: str, control: str) -> None:
        self.url, self._control = url, control

    def set(self, **settings: object) -> None:
        """Change settings (`Settings`), or `do` one of down, up, reset."""
        self._call(json.dumps(settings).encode())

    @property
    def sent(self) -> list[Sent]:
        """All bodies since the last reset, in the order in which they ended."""
        return [Sent(**entry) for entry in self._call(None)["sent"]]

    def _call(self, data: bytes | None) -> dict[str, Any]:
        with urllib.request.urlopen(self._control, data) as reply:
            return dict(json.load(reply))


@contextmanager
def running(directory: Path, rate: float | None = None) -> Iterator[Remote]:
    """A range server over `directory` in a process of its own, ended when the block is left."""
    command = [sys.executable, __file__, str(directory), *([] if rate is None else ["--rate", str(rate)])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield Remote(**json.loads(process.stdout.readline()))
    finally:
        process.terminate()
        process.communicate()


class _Control(BaseHTTPRequestHandler):
    owner: RangeServer

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""

    def do_GET(self) -> None:
        sent = [asdict(entry) for entry in self.owner.sent]
        self._reply({"sent": sent, "settings": asdict(self.owner.settings)})

    def do_POST(self) -> None:
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if (action := wanted.pop("do", None)) in ("down", "up", "reset"):
            getattr(self.owner, action)()
        for name, value in wanted.items():
            setattr(self.owner.settings, name, [tuple(v) for v in value] if name == "flips" else value)
        self._reply(asdict(self.owner.settings))

    def _reply(self, document: object) -> None:
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    """Serve a directory until ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--port", type=int, default=0)
    wanted = parser.parse_args()
    server = RangeServer(wanted.directory, wanted.rate, wanted.port)
    control = ThreadingHTTPServer((HOST, 0), type("Control", (_Control,), {"owner": server}))
    print(json.dumps({"url": server.url, "control": f"http://{HOST}:{control.server_port}"}), flush=True)
    control.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
