"""Model servers of a fleet without a model: separate processes behind the real starter, supervisors and leases.

A server answers a completion with its pid and its request count. With --max-model-len N a
server waits N milliseconds before it is ready. A stream has `max_tokens` pieces, `pause_s` seconds apart; a request for token
ids returns the stream of `fake_model`. A server that fetches weights does so like `coldstart serve`: its model is a directory
with a config.json and a plan.json, and it is ready when the tensors of its rank are there.
"""

import json
import os
import socket
import socketserver
import sys
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from support import fake_model

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.contract.weights import LimitedFetch, WeightsRequest
from coldstart.host.live import starter
from coldstart.host.live.servers import ServerStarter
from coldstart.launch import fetch
from coldstart.system.ipc import json_lines
from coldstart.system.proc.lifeline import die_with_supervisor
from coldstart.vllm.weights.entry import LOAD_FORMAT
from coldstart.weights.prefetch import client

TOKEN_S = 0.02


class FakeStarter(ServerStarter):
    """The real starter for the servers of this module."""

    module = "support.fleet_servers"


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body are two writes: the second would wait for the first one's acknowledgement.
    disable_nagle_algorithm = True
    count = 0

    def do_POST(self) -> None:
        if self.headers["Authorization"] != f"Bearer {os.environ['VLLM_API_KEY']}":
            self.send_error(401)
            return
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).count += 1
        said = {"pid": os.getpid(), "model": body["model"], "count": self.count, "prompt": body.get("prompt")}
        said["url"], said["key"] = f"http://{self.headers['Host']}", os.environ["VLLM_API_KEY"]
        if not body.get("stream"):
            time.sleep(body.get("pause_s", 0))
            content = json.dumps(said).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if body.get("return_token_ids"):
            for event in fake_model.events(body, f"cmpl-{os.getpid()}-{self.count}"):
                self._event(event)
                time.sleep(TOKEN_S)
            body["max_tokens"] = 0
        for number in range(body.get("max_tokens", 3)):
            self._event({**said, "number": number})
            time.sleep(body.get("pause_s", 0))
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, event: Any) -> None:
        self._chunk(f"data: {json.dumps(event)}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        """Send a chunk, so that a killed server differs from one that has ended its response."""
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def log_message(self, *_: Any) -> None: ...


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def server_bind(self) -> None:
        """Bind without a reverse lookup of the address, which takes ten seconds without a name server."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])


def supervise(message: Mapping[str, Any], channel: json_lines.Channel) -> int:
    """Serve in this process instead of planning and starting a server."""
    channel.send({"process": os.getpid()})
    os.environ.update(message["environment"])
    words = list(message["launch"]["args"])
    if "--max-model-len" in words:
        time.sleep(int(words[words.index("--max-model-len") + 1]) / 1000)
    if message["launch"]["weights_from"] is not None:
        _fetch(message, words)
    listen = dict(zip(message["listen"][::2], message["listen"][1::2], strict=True))
    server = _Server((listen["--host"], int(listen["--port"])), _Answer)
    channel.send({"ready": {"mode": "fake", "pid": os.getpid(), "phases": {}, "fallbacks": []}})
    server.serve_forever()
    return 0


def _fetch(message: Mapping[str, Any], words: list[str]) -> None:
    model, rate_limit = Path(message["launch"]["model"]), LimitedFetch(**message["rate_limit"])
    config = json.loads((model / "config.json").read_text())
    asked = WeightsRequest(message["launch"]["weights_from"], model / "plan.json", rate_limit)
    plan = LaunchPlan(Arguments([*words, "--load-format", LOAD_FORMAT]), weights_from=asked)
    names = fetch._list_node_tensors(asked.read(), config, plan.vllm_args)
    with (
        fetch.start_early_fetch(plan, config),
        client.attach(asked.source, asked.read(), names=names, rate_limit=rate_limit) as attached,
    ):
        attached.wait_for_tensors()


if __name__ == "__main__":
    die_with_supervisor()
    starter.serve_forever(json_lines.Channel(socket.socket(fileno=int(sys.argv[1]))), supervise)
