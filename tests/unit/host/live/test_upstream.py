"""HTTP requests to one server: aiohttp's server, and malformed responses."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.fake_upstream import wait_until
from tools.link_cluster import LinkCluster, find_missing, link_cluster

from coldstart.host.live.upstream import LARGE, DisconnectedError, NothingSentError, Upstream


@asynccontextmanager
async def _served(directory: Path, handler: Any) -> Any:
    """Run an aiohttp server and yield connections to it."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(directory / "s")).start()
    there = Upstream(directory / "s")
    try:
        yield there
    finally:
        there.close()
        await runner.cleanup()


@asynccontextmanager
async def _saying(directory: Path, said: bytes) -> Any:
    """Run a server that answers every request with these bytes and closes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        await writer.drain()
        writer.close()

    async with await asyncio.start_unix_server(answer, str(directory / "s")):
        there = Upstream(directory / "s")
        yield there
        there.close()


async def test_a_request_arrives_as_it_was_sent_and_connections_are_used_again(tmp_path: Path) -> None:
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.method, request.path_qs, request.headers["x-own"], await request.read()))
        return web.Response(status=201, body=b"y" * 300_000, headers={"x-said": "1"})

    async with _served(tmp_path, handler) as there:
        for body in (b"", b"x" * 2_000_000):
            headers = [(b"x-own", b"v"), (b"content-type", b"application/json")]
            async with await there.request("POST", "/v1/x?a=b%20c", headers=headers, body=body) as answer:
                assert answer.status == 201 and (b"x-said", b"1") in [
                    (name.lower(), value) for name, value in answer.headers
                ]
                assert await answer.read() == b"y" * 300_000 and await answer.read_chunk() == b""
            assert seen.pop() == ("POST", "/v1/x?a=b%20c", "v", body)
        assert not there.responses


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", b"ok"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", b"ok"),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok", None),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n", None),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nnonsense", None),
        (b"HTTP/1.1 2", None),
        (b"SSH-2.0-OpenSSH\r\n", None),
        (b"", None),
    ],
)
async def test_incomplete_answer_is_refused(tmp_path: Path, said: bytes, found: bytes | None) -> None:
    async with _saying(tmp_path, said) as there:
        if found is not None:
            async with await there.request("POST", "/") as answer:
                assert await answer.read() == found
        else:
            with pytest.raises(DisconnectedError):
                async with await there.request("POST", "/") as answer:
                    await answer.read()
        assert not there.responses


async def test_request_to_a_server_that_is_gone_was_not_sent(tmp_path: Path) -> None:
    with pytest.raises(NothingSentError, match="No such file"):
        await Upstream(tmp_path / "s").request("GET", "/")


WHY = find_missing()
# Slow: the tests wait for time limits of the kernel.
linked = pytest.mark.skipif(WHY is not None, reason=str(WHY))
# Generous: the kernel's own patience is a quarter of an hour for what was sent, and endless for what is waited for.
PATIENCE_S = 60
# Answers GET at once, begins a stream that never ends for PUT, and nothing else.
SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "2"); self.end_headers(); self.wfile.write(b"ok")
    def do_PUT(self):
        self.send_response(200); self.send_header("transfer-encoding", "chunked"); self.end_headers()
        self.wfile.write(b"1\\r\\nx\\r\\n"); self.wfile.flush(); self.do_POST()
    def do_POST(self):
        import time; time.sleep(600)
    def log_message(self, *_): pass
server = ThreadingHTTPServer((sys.argv[1], 8000), Answer)
print(flush=True)
server.serve_forever()
"""


@contextmanager
def _linked(cluster: LinkCluster) -> Iterator[Upstream]:
    cluster.add("node")
    command = cluster.within("node", sys.executable, "-c", SERVER, cluster.address("node"))
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            yield Upstream((cluster.address("node"), 8000), connect_s=1.0)
        finally:
            server.kill()


async def _asked(there: Upstream, method: str, body: bytes = b"") -> None:
    async with asyncio.timeout(PATIENCE_S):
        async with await there.request(method, "/", body=body) as answer:
            await answer.read()


@linked
@pytest.mark.slow
async def test_request_to_an_unreachable_machine_fails_with_the_reason() -> None:
    with link_cluster() as cluster, _linked(cluster) as there:
        waiting = [asyncio.create_task(_asked(there, method)) for method in ("POST", "PUT")]
        await wait_until(lambda: len(there.responses) == 2)
        # The connection is retained and reused after the cut, when no sent byte is acknowledged.
        await asyncio.gather(*(_asked(there, "GET") for _ in range(2)))
        assert not any(one.done() for one in waiting)
        cluster.cut("node")
        waiting += [asyncio.create_task(_asked(there, "POST", bytes(size))) for size in (0, LARGE + 1)]
        for one in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(one, NothingSentError) or "was lost" in str(one)
        with pytest.raises(NothingSentError):
            await _asked(there, "GET")
        cluster.reconnect("node")
        answered = False
        while not answered:  # the kernel forgets after a moment that the machine was unreachable
            with suppress(NothingSentError):
                await _asked(there, "GET")
                answered = True
        there.close()


@linked
@pytest.mark.slow
async def test_silent_server_is_awaited() -> None:
    with link_cluster() as cluster, _linked(cluster) as there:
        waiting = [asyncio.create_task(_asked(there, "POST", bytes(size))) for size in (0, 1 << 14)]
        assert not (await asyncio.wait(waiting, timeout=6))[0]
        there.close()
        await asyncio.gather(*waiting, return_exceptions=True)
