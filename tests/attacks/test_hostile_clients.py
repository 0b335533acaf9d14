"""Clients that send too much, too slowly, or read nothing: each is disconnected, and others are served."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.fake_upstream import Stage, staged, wait_until
from support.fleet_rig import deployment, fleet

from coldstart.host.endpoint import GatewayEndpoint, GatewayLimits
from coldstart.host.live import http_server

ATTACKER = "127.0.0.2"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
JSON = {"content-type": "application/json"}
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


class Attacker:
    """One connection from the address of an attacker."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, stage: Stage, address: str = ATTACKER) -> Attacker:
        port = int(stage.url.rpartition(":")[2])
        return cls(*await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0)))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def send_until_refused(self, data: bytes, most: int) -> int:
        """Send `data` until the gateway disconnects; return the bytes sent, at most about `most`."""
        sent = 0
        while sent < most and not self.reader.at_eof():
            try:
                await self.send(data)
            except OSError:
                break
            sent += len(data)
        return sent

    async def answer(self) -> bytes:
        """Return everything until the gateway closes the connection."""
        try:
            return await self.reader.read()
        except OSError:
            return b""

    async def status(self) -> int:
        """Return the status of an answer to the end of the connection; 0 for none."""
        found = await self.answer()
        return int(found.split(b" ", 2)[1]) if found else 0

    def close(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def attack(directory: Path, **limits: Any) -> AsyncIterator[Stage]:
    """Yield a gateway with these limits; afterwards a client is served and no connection is left."""
    endpoint = GatewayEndpoint(limits=GatewayLimits(**limits))
    async with staged(directory, gateway={"endpoint": endpoint}) as stage:
        yield stage
        assert (await stage.ask(model="a", prompt="good"))[0] == 200
        await wait_until(lambda: not stage.server.server_state.connections)


@pytest.mark.parametrize(
    "piece",
    [b"x" * 4096, b"x: y\r\n" * 512, b"GET /" + b"x" * 65536],
    ids=["one header", "many headers", "a long path"],
)
async def test_endless_headers_are_refused_after_the_limit(tmp_path: Path, piece: bytes) -> None:
    async with attack(tmp_path) as stage:
        attacker = await Attacker.connect(stage)
        await attacker.send(b"" if piece.startswith(b"GET") else GET + b"a: ")
        sent = await attacker.send_until_refused(piece, 64 << 20)
        assert sent < 16 << 20  # what the kernel's buffers take
        assert await attacker.status() in (0, 431)
        attacker.close()


async def test_endless_trailers_are_refused(tmp_path: Path) -> None:
    async with attack(tmp_path) as stage:
        attacker = await Attacker.connect(stage)
        await attacker.send(POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\na: ")
        assert await attacker.send_until_refused(b"x" * 4096, 64 << 20) < 16 << 20
        attacker.close()


@pytest.mark.parametrize(
    "start",
    [b"", b"GET /health HTTP/1.1\r\nhost: loc", GET + b"\r\n" + GET],
    ids=["nothing", "half of the headers", "half of the second request"],
)
async def test_half_headers_end_after_their_time(tmp_path: Path, start: bytes) -> None:
    async with attack(tmp_path, head_s=0.1) as stage:
        attacker = await Attacker.connect(stage)
        await attacker.send(start)
        found = await attacker.answer()
        assert found.endswith(b'"code": 408}}')
        assert found.count(b" 200 OK") == start.count(b"\r\n\r\n")


async def test_empty_lines_do_not_keep_a_connection_open(tmp_path: Path) -> None:
    async with attack(tmp_path, head_s=0.1) as stage:
        attacker = await Attacker.connect(stage)
        await attacker.send(GET + b"\r\n")
        await attacker.reader.readuntil(b"\r\n\r\n")
        await attacker.send(b"\r\n")
        assert await attacker.status() == 408


@pytest.mark.parametrize(
    ("limit", "data", "status"),
    [
        ({"head_bytes": 1024}, GET + b"a: " + b"x" * 2000 + b"\r\n\r\n", 431),
        ({"head_bytes": 1024}, GET + b"a: b\r\n" * 200 + b"\r\n", 431),
        ({"body_s": 0.1}, POST + b"content-length: 100\r\n\r\n{", 408),
        ({"head_s": 0.1}, POST.replace(b"/json", b"/plain") + b"content-length: 100\r\n\r\n{", 415),
    ],
    ids=["long header", "many headers", "slow body", "rest of a refused body"],
)
async def test_request_over_a_limit_gets_its_status(
    tmp_path: Path, limit: dict[str, Any], data: bytes, status: int
) -> None:
    async with attack(tmp_path, **limit) as stage:
        attacker = await Attacker.connect(stage)
        await attacker.send(data)
        assert await attacker.status() == status


@pytest.mark.parametrize("framing", [b"content-length: 2000", b"transfer-encoding: chunked"])
@pytest.mark.parametrize("path", [b"/v1/completions", b"/unload"])
async def test_body_over_limit_is_refused_on_every_path(tmp_path: Path, framing: bytes, path: bytes) -> None:
    async with attack(tmp_path, body_bytes=1024) as stage:
        attacker = await Attacker.connect(stage)
        body = b" " * 2000 if b"length" in framing else b"7d0\r\n" + b" " * 2000 + b"\r\n0\r\n\r\n"
        await attacker.send(POST.replace(b"/v1/completions", path) + framing + b"\r\n\r\n" + body)
        assert await attacker.status() == 413


async def _find_border(ask: Callable[[str], Awaitable[int]]) -> tuple[int, set[int]]:
    """Send JSON of many depths; return the largest depth that passes and the statuses of the refused ones."""
    passed, refused, statuses = 0, 200_000, set[int]()
    while refused - passed > 1:
        depth = (passed + refused) // 2
        status = await ask("[" * depth + "]" * depth)
        statuses.add(status)
        passed, refused = (depth, refused) if status == 200 else (passed, depth)
    # A parser and a writer may differ by some levels.
    for depth in range(max(1, passed - 20), passed + 20):
        statuses.add(await ask("[" * depth + "]" * depth))
    return passed, statuses


@pytest.mark.parametrize("model", ["a", "alpha"], ids=["passed on", "another name is written"])
async def test_json_of_any_depth_passes_or_is_a_400(tmp_path: Path, model: str) -> None:
    async with attack(tmp_path) as stage:

        async def ask(deep: str) -> int:
            body = f'{{"model": "{model}", "prompt": "x", "pieces": 1, "deep": {deep}}}'
            async with stage.client.post(stage.url + "/v1/completions", data=body, headers=JSON) as answer:
                return answer.status

        passed, statuses = await _find_border(ask)
        assert passed > 100 and statuses == {200, 400}


async def test_json_of_any_depth_in_a_resumable_stream_passes_or_is_a_400(tmp_path: Path) -> None:
    async with fleet(tmp_path) as stage:
        stage.deploy(deployment("a"))

        async def ask(deep: str) -> int:
            body = f'{{"model": "a", "prompt": "x", "stream": true, "max_tokens": 1, "logit_bias": {deep}}}'
            url = stage.rig.url + "/v1/completions"
            async with stage.client.post(url, data=body, headers=JSON) as answer:
                if answer.status == 200:
                    assert "[DONE]" in await answer.text()
                return answer.status

        passed, statuses = await _find_border(ask)
        assert passed > 100 and statuses == {200, 400}


async def test_waiting_bodies_take_no_more_memory_than_the_limit(tmp_path: Path) -> None:
    async with attack(tmp_path, body_bytes=1024, buffered_bytes=8192, head_s=0.2) as stage:
        waiting = []
        for _ in range(10):
            attacker = await Attacker.connect(stage)
            await attacker.send(POST + b"content-length: 1024\r\n\r\n" + b" " * 1000)
            waiting.append(attacker)
        refused = [asyncio.ensure_future(one.status()) for one in waiting]
        await asyncio.wait(refused, return_when=asyncio.FIRST_COMPLETED)
        assert {one.result() for one in refused if one.done()} == {503}
        assert stage.driver.facts.refused[503] > 0
        for attacker in waiting:
            attacker.close()
        await asyncio.wait(refused)


async def test_connections_above_the_limit_get_503(tmp_path: Path) -> None:
    async with attack(tmp_path, connections=4) as stage:
        attackers = [await Attacker.connect(stage) for _ in range(5)]
        await attackers[0].send(GET + b"\r\n")
        assert b" 200 OK" in await attackers[0].reader.readuntil(b"\r\n\r\n")
        assert await attackers[4].status() == 503
        assert stage.driver.facts.refused == {503: 1}
        for attacker in attackers:
            attacker.close()
        await wait_until(lambda: not stage.server.server_state.connections)


def test_descriptors_bound_connections_and_the_soft_limit_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"soft": (64, 1024)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["soft"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.update(soft=pair))
    found = http_server.raise_connection_limit()
    assert limits["soft"] == (1024, 1024)
    assert 0 < found <= (1024 - http_server.RESERVED_DESCRIPTORS) // 2


async def test_client_that_does_not_read_is_disconnected_and_holds_no_model(tmp_path: Path) -> None:
    async with attack(tmp_path, write_s=0.5) as stage:
        attacker = await Attacker.connect(stage)
        body = json.dumps({"model": "a", "prompt": "x" * 4000, "pieces": 1_000_000, "stream": True}).encode()
        await attacker.send(POST + b"content-length: %d\r\n\r\n" % len(body) + body)
        await wait_until(lambda: stage.driver.facts.get_model("a").chunks_streamed)
        attacker.writer.transport.pause_reading()  # type: ignore[attr-defined]
        # Model b needs the memory of a, which is in use until the attacker is disconnected.
        assert (await stage.ask(model="b", prompt="x"))[0] == 200
        assert stage.servers.last("a").gone
        attacker.close()


async def test_invalid_requests_are_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with attack(tmp_path) as stage:
        for data in (b"nothing\r\n\r\n", GET + b"connection: upgrade\r\nupgrade: x\r\n\r\n"):
            attacker = await Attacker.connect(stage)
            await attacker.send(data)
            await attacker.reader.readline()
            attacker.close()
    assert [one for one in caplog.records if one.name.startswith("uvicorn")] == []


async def test_pipelined_requests_are_bounded(tmp_path: Path) -> None:
    async with attack(tmp_path) as stage:
        attacker = await Attacker.connect(stage)
        await attacker.send((GET + b"\r\n") * 5000)
        assert (await attacker.answer()).count(b" 200 OK") < 1000
        attacker.close()


@pytest.mark.parametrize("given", [b"a\tb", b'"quoted"', b"<script>", b"{}", b"a b", b"x" * 129])
async def test_request_id_with_other_characters_is_replaced(tmp_path: Path, given: bytes) -> None:
    async with attack(tmp_path) as stage:
        headers = {"X-Request-Id": given.decode()}
        url = stage.url + "/v1/completions"
        async with stage.client.post(url, json={"model": "a", "prompt": "x"}, headers=headers) as answer:
            assert answer.status == 200 and len(answer.headers["x-request-id"]) == 32
        assert stage.servers.last("a").headers[0]["x-request-id"] != given.decode()
