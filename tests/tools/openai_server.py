"""A small OpenAI-compatible server with the behaviours a replay client meets."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tools import raw_server
from tools.raw_server import HEAD_END, Asked


@dataclass
class FakeServer:
    """Streams `max_tokens` chunks, `gap_s` apart. `mode`: ok, error, hang, cut, length (not chunked)."""

    mode: str = "ok"
    gap_s: float = 0.0
    bodies: list[dict[str, object]] = field(default_factory=list)
    answered: int = 0
    port: int = 0
    text: str = "too many!"

    def answer(self, connection: socket.socket, asked: Asked) -> None:
        """Answer a request and close its connection."""
        body = json.loads(asked.raw.partition(HEAD_END)[2])
        self.bodies.append(body)
        self._answer(connection, body["max_tokens"])
        self.answered += 1
        connection.shutdown(socket.SHUT_RDWR)

    def _answer(self, connection: socket.socket, wanted: int) -> None:
        if self.mode == "error":
            return raw_server.answer(connection, 429, {}, self.text.encode())
        if self.mode == "hang":
            return time.sleep(30)
        chunked = self.mode != "length"
        connection.sendall(
            b"HTTP/1.1 200 OK\r\n" + (b"Transfer-Encoding: chunked\r\n" if chunked else b"") + b"\r\n"
        )
        for number in range(wanted):
            if self.mode == "cut" and number == 1:
                return None
            time.sleep(self.gap_s)
            self._event(connection, {"choices": [{"text": "x"}]}, chunked)
        self._event(connection, {"choices": [], "usage": {"completion_tokens": wanted}}, chunked)
        end = b"6\r\ndata: \r\n8\r\n[DONE]\n\n\r\n0\r\n\r\n" if chunked else b"data: [DONE]\n\n"
        return connection.sendall(end)

    def _event(self, connection: socket.socket, event: object, chunked: bool) -> None:
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        connection.sendall(b"%x\r\n%s\r\n" % (len(data), data) if chunked else data)


@contextmanager
def running(server: FakeServer) -> Iterator[FakeServer]:
    with raw_server.answering(server.answer) as place:
        server.port = place.port
        yield server
