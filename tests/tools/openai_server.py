"""A small OpenAI-compatible server with the behaviours a replay client meets."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class FakeServer:
    """Streams `max_tokens` chunks, `gap_s` apart. `mode`: ok, error, hang, cut, length (not chunked)."""

    mode: str = "ok"
    gap_s: float = 0.0
    bodies: list[dict[str, object]] = field(default_factory=list)
    answered: int = 0
    port: int = 0
    text: str = "too many!"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("Content-Length")
        )
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        await self._answer(writer, body)
        self.answered += 1
        writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, body: dict[str, object]) -> None:
        if self.mode == "error":
            text = self.text.encode()
            writer.write(b"HTTP/1.1 429 Busy\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
            return
        if self.mode == "hang":
            await asyncio.sleep(30)
            return
        chunked = self.mode != "length"
        writer.write(
            b"HTTP/1.1 200 OK\r\n" + (b"Transfer-Encoding: chunked\r\n" if chunked else b"") + b"\r\n"
        )
        wanted = int(str(body["max_tokens"]))
        for number in range(wanted):
            if self.mode == "cut" and number == 1:
                return
            await asyncio.sleep(self.gap_s)
            await self._event(writer, {"choices": [{"text": "x"}]}, chunked)
        await self._event(writer, {"choices": [], "usage": {"completion_tokens": wanted}}, chunked)
        writer.write(b"6\r\ndata: \r\n8\r\n[DONE]\n\n\r\n0\r\n\r\n" if chunked else b"data: [DONE]\n\n")
        await writer.drain()

    async def _event(self, writer: asyncio.StreamWriter, event: object, chunked: bool) -> None:
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        writer.write(b"%x\r\n%s\r\n" % (len(data), data) if chunked else data)
        await writer.drain()


@contextmanager
def running(server: FakeServer) -> Iterator[FakeServer]:
    loop, ready = asyncio.new_event_loop(), threading.Event()

    async def main() -> None:
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        server.port = listener.sockets[0].getsockname()[1]
        ready.set()

    def serve() -> None:
        loop.run_until_complete(main())
        loop.run_forever()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    ready.wait(30)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
