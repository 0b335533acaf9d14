"""Servers behind their leases on the event loop."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from support.fake_upstream import wait_until
from tools.link_cluster import LinkCluster, find_missing, link_cluster

from coldstart.host.launches import Launch
from coldstart.host.live import servers
from coldstart.host.live.servers import ModelServer, ServerStarter, StartFailedError
from coldstart.host.live.starter import StartOrder
from coldstart.host.live.upstream import LARGE, DisconnectedError, NothingSentError, Upstream
from coldstart.system.ipc import json_lines
from coldstart.system.paths import Cache
from coldstart.system.proc import exits, processes, scratch
from coldstart.system.start_progress import StartProgress


class ForkedServer:
    """A server whose supervisor is this test."""

    def __init__(self, directory: Path) -> None:
        (directory / "s").touch()
        (directory / "log").write_text("INFO fine\nValueError: too little memory\n")
        ours, theirs = socket.socketpair()
        self.server = ModelServer(directory / "s", directory / "log", ours)
        self.there = json_lines.Channel(theirs)
        self.there.send({"process": 0})

    async def end(self, *messages: dict[str, Any]) -> str:
        for message in messages:
            self.there.send(message)
        self.there.close()
        return await self.server.ended


async def test_a_server_that_came_up_and_ended(tmp_path: Path) -> None:
    leased = ForkedServer(tmp_path)
    leased.there.send({"progress": {"phase": "load weights", "done": 1, "total": 2, "unit": "shards"}})
    await wait_until(lambda: leased.server.progress is not None)
    assert leased.server.progress == StartProgress("load weights", 1, 2, "shards")
    leased.there.send({"ready": {"mode": "fresh", "pid": 7}})
    ready = await leased.server.ready
    assert leased.server.progress is None
    assert (ready.mode, ready.pid) == ("fresh", 7)
    leased.server.stop()
    assert leased.there.receive() == [{"signal": 15}]
    assert await leased.end({"exit": 143}) == "the server exited with code 143"
    assert list(tmp_path.iterdir()) == []
    leased.server.stop()


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"failed": {"message": "no bundle"}}], "no bundle: ValueError: too little memory"),
        (
            [{"failed": {"message": "vLLM rejects its arguments"}, "final": True}],
            "vLLM rejects its arguments",
        ),
        ([{"exit": 1}], "the server exited with code 1: ValueError: too little memory"),
        ([], "the server's supervisor was killed: ValueError: too little memory"),
    ],
)
async def test_failed_server_reports_the_reason(tmp_path: Path, messages: list[Any], reason: str) -> None:
    leased = ForkedServer(tmp_path)
    await leased.end(*messages)
    with pytest.raises(StartFailedError) as failed:
        await leased.server.ready
    assert str(failed.value) == reason


async def test_malformed_message_ends_the_server(tmp_path: Path) -> None:
    leased = ForkedServer(tmp_path)
    leased.there.socket.sendall(b"nonsense\n")
    assert "not JSON" in await leased.server.ended


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.slow
async def test_starter_process_that_begins_no_order_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(servers, "RESTART_S", 0.0)
    starter = ServerStarter(tmp_path, Cache(tmp_path / "cache"), offline=True)
    starter.start_process()
    first = starter._process
    assert first is not None
    os.kill(first.pid, signal.SIGSTOP)  # it takes no order, whatever comes first
    with monkeypatch.context() as hasty:
        hasty.setattr(servers, "BEGIN_S", 0.0)
        lost = starter.order_start(StartOrder(Launch("a", "/nowhere"), 9.0))
        os.kill(first.pid, number)
        assert await lost.ended == "the server's starter process was killed" and lost.was_killed
    await wait_until(lambda: starter._process is not None and starter._process is not first)
    with pytest.raises(StartFailedError, match="/nowhere"):
        await starter.order_start(StartOrder(Launch("a", "/nowhere"), 9.0)).ready
    await starter.close()
    assert first.wait() == -signal.SIGKILL


async def test_close_kills_the_starter_process_and_removes_what_the_killed_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "_choose_base", lambda: tmp_path)
    directory = tmp_path / "server-killed"
    directory.mkdir()
    (directory / "lock").write_text("1")
    starter = ServerStarter(tmp_path, Cache(tmp_path / "cache"), offline=True)
    starter.start_process()
    await starter.close()
    assert starter._process is not None and starter._process.returncode == -signal.SIGKILL
    assert not directory.exists()


async def test_server_hangs_if_five_checks_in_a_row_find_it_suspended() -> None:
    found = iter([True, True, False, *[True] * 5])
    server: Any = SimpleNamespace(is_stopped=lambda: next(found, None))
    async with asyncio.timeout(30):
        reason = await servers.await_hang(server, None, lambda: 0.004)
    assert reason == "a process of the server was suspended by a signal for 0.004 s" and not list(found)


async def test_kill_ends_a_stopped_supervisor_and_its_server(tmp_path: Path) -> None:
    leased = ForkedServer(tmp_path)
    tree = subprocess.Popen(["/bin/sh", "-c", "sleep 60 & echo; wait"], stdout=subprocess.PIPE)
    assert tree.stdout is not None and tree.stdout.readline() == b"\n"
    leased.there.send({"process": tree.pid})
    await wait_until(lambda: len(leased.server._trees) == 2)
    assert not leased.server.is_stopped()
    (child,) = processes.list_children(tree.pid)
    os.kill(child, signal.SIGSTOP)
    await wait_until(leased.server.is_stopped)
    leased.server.kill()
    assert tree.wait() == -signal.SIGKILL
    await wait_until(lambda: processes.read_identity(child) is None)
    await leased.end()


async def test_end_names_kernel_when_memory_ran_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leased = ForkedServer(tmp_path)
    monkeypatch.setattr(exits, "count_oom_kills", lambda: 10**9)
    assert await leased.end({"code": 137}) == (
        "the server was killed by signal 9 (SIGKILL): the kernel killed a process because memory was exhausted"
    )
    assert not leased.server.was_killed


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
                assert answer.status == 201
                assert (b"x-said", b"1") in [(name.lower(), value) for name, value in answer.headers]
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
        with pytest.raises(DisconnectedError) if found is None else nullcontext():
            async with await there.request("POST", "/") as answer:
                assert await answer.read() == found
        assert not there.responses


async def test_request_to_a_server_that_is_gone_was_not_sent(tmp_path: Path) -> None:
    with pytest.raises(NothingSentError, match="No such file"):
        await Upstream(tmp_path / "s").request("GET", "/")


async def test_request_is_not_sent_when_its_server_ends_while_connecting() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        there = Upstream(full.getsockname())
        # The kernel completes one or two connections, of any of the requests, although nobody accepts them.
        sending = [asyncio.create_task(there.request("POST", "/")) for _ in range(4)]
        await wait_until(lambda: any(one.done() for one in sending) and len(there.responses) == 4)
        there.close()
        results = await asyncio.gather(*sending, return_exceptions=True)
        assert any(isinstance(result, NothingSentError) for result in results)


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
        with pytest.raises(ConnectionError):  # aiohttp repeats a GET that a retained connection lost
            await _asked(there, "GET")
        cluster.reconnect("node")
        answered = False
        while not answered:  # the kernel forgets after a moment that the machine was unreachable
            with suppress(ConnectionError):
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
