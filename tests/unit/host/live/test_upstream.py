"""HTTP requests to one server: aiohttp's server, and malformed responses."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.fake_upstream import run, wait_until

from coldstart.host.live import upstream
from coldstart.host.live.upstream import DisconnectedError, Upstream


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
        yield Upstream(directory / "s")


def test_a_request_arrives_as_it_was_sent_and_connections_are_used_again(tmp_path: Path) -> None:
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.method, request.path_qs, request.headers["x-own"], await request.read()))
        return web.Response(status=201, body=b"y" * 300_000, headers={"x-said": "1"})

    async def work() -> None:
        async with _served(tmp_path, handler) as there:
            for body in (b"", b"x" * 2_000_000):
                headers = [(b"x-own", b"v"), (b"content-type", b"application/json")]
                async with await there.request("POST", "/v1/x?a=b%20c", headers=headers, body=body) as answer:
                    assert answer.status == 201 and (b"x-said", b"1") in [
                        (name.lower(), value) for name, value in answer.headers
                    ]
                    assert await answer.read() == b"y" * 300_000 and await answer.piece() == b""
                assert seen.pop() == ("POST", "/v1/x?a=b%20c", "v", body)
            assert len(there._all) == len(there._idle) == 1

    run(work())


def test_pieces_arrive_as_sent_and_a_disconnect_is_noticed(tmp_path: Path) -> None:
    left, first_taken = asyncio.Event(), asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        try:
            for number in range(10_000):
                await answer.write(b"%d\n" % number)
                await first_taken.wait()
                await asyncio.sleep(0.001)
        finally:
            left.set()
        return answer

    async def work() -> None:
        async with _served(tmp_path, handler) as there:
            async with await there.request("POST", "/") as answer:
                assert await answer.piece() == b"0\n"
                first_taken.set()
                assert (await answer.piece()).startswith(b"1\n")
            await left.wait()
            assert not there._idle

    run(work())


def test_a_slow_reader_stops_the_server_and_gets_all(tmp_path: Path) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for _ in range(200):
            await answer.write(b"x" * 65536)
        return answer

    async def work() -> None:
        async with _served(tmp_path, handler) as there, await there.request("GET", "/") as answer:
            await asyncio.sleep(0.1)
            assert answer._unread <= upstream.MOST_UNREAD + (1 << 20)
            assert sum([len(part) async for part in _parts(answer)]) == 200 * 65536

    run(work())


async def _parts(answer: Any) -> Any:
    while part := await answer.piece():
        yield part


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
def test_incomplete_answer_is_refused(tmp_path: Path, said: bytes, found: bytes | None) -> None:
    async def work() -> None:
        async with _saying(tmp_path, said) as there:
            if found is not None:
                async with await there.request("POST", "/") as answer:
                    assert await answer.read() == found
            else:
                with pytest.raises(DisconnectedError):
                    async with await there.request("POST", "/") as answer:
                        await answer.read()
            await wait_until(lambda: not there._all)

    run(work())


@pytest.mark.slow
def test_idle_connections_are_closed_and_a_server_that_is_gone_is_an_error(tmp_path: Path) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def work() -> None:
        async with _served(tmp_path, handler) as there:
            there.keep_alive_s = 0.02
            async with await there.request("GET", "/") as answer:
                await answer.read()
            assert there._idle
            await wait_until(lambda: not there._all and not there._idle)
        (tmp_path / "s").unlink(missing_ok=True)
        with pytest.raises(OSError, match="No such file"):
            await there.request("GET", "/")

    run(work())
