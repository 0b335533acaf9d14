"""A server behind a link that is cut: its requests end, so that another server can answer."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.fake_upstream import wait_until
from tools.link_cluster import LinkCluster, find_missing, link_cluster

from coldstart.host.live.http_server import loop_factory
from coldstart.host.live.upstream import LARGE, DisconnectedError, NothingSentError, Upstream

WHY = find_missing()
# Slow: the tests wait for time limits of the kernel.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(WHY is not None, reason=str(WHY))]
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
def _served(cluster: LinkCluster) -> Iterator[Upstream]:
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


def test_request_to_an_unreachable_machine_fails_with_the_reason() -> None:
    async def work(cluster: LinkCluster, there: Upstream) -> None:
        waiting = [asyncio.create_task(_asked(there, method)) for method in ("POST", "PUT")]
        await wait_until(lambda: len(there._all) == 2)
        # The connection is retained and reused after the cut, when no sent byte is acknowledged.
        await asyncio.gather(*(_asked(there, "GET") for _ in range(2)))
        assert not any(one.done() for one in waiting) and len(there._idle) == 2
        cluster.cut("node")
        waiting += [asyncio.create_task(_asked(there, "POST", bytes(size))) for size in (0, LARGE + 1)]
        for one in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(one, DisconnectedError) and "was lost" in str(one)
        with pytest.raises(NothingSentError):
            await _asked(there, "GET")
        cluster.reconnect("node")
        await _asked(there, "GET")
        there.close()

    with (
        link_cluster() as cluster,
        _served(cluster) as there,
        asyncio.Runner(loop_factory=loop_factory()) as runner,
    ):
        runner.run(work(cluster, there))


def test_silent_server_is_awaited() -> None:
    async def work(there: Upstream) -> None:
        waiting = [asyncio.create_task(_asked(there, "POST", bytes(size))) for size in (0, 1 << 14)]
        assert not (await asyncio.wait(waiting, timeout=6))[0]
        there.close()
        await asyncio.gather(*waiting, return_exceptions=True)

    with (
        link_cluster() as cluster,
        _served(cluster) as there,
        asyncio.Runner(loop_factory=loop_factory()) as runner,
    ):
        runner.run(work(there))
