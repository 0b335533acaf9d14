"""Requests that a proxy in front and the gateway could read differently: the second one in them reaches no model.

A proxy sends the requests of several clients over one connection. What an attacker hides in a body must not become the
next request there, which would run with the key of another client.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support.fake_upstream import staged

from coldstart.host.endpoint import GatewayEndpoint

KEY = b"authorization: Bearer k\r\n"
TYPE = b"content-type: application/json\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
GOOD = json.dumps({"model": "a", "prompt": "good"}).encode()
CHUNKED = b"transfer-encoding: chunked\r\n"
SPLITS = "together", "later", "bytes"


def build_request(prompt: str = "good", more: bytes = b"connection: close\r\n") -> bytes:
    """Return a valid request with a key. Its answer ends the connection unless `more` replaces that header."""
    body = json.dumps({"model": "a", "prompt": prompt}).encode()
    return b"%b%b%bcontent-length: %d\r\n\r\n%b" % (POST, more, KEY + TYPE, len(body), body)


SMUGGLED = build_request("smuggled")
LENGTH = b"content-length: %d\r\n" % len(SMUGGLED)


@asynccontextmanager
async def open_gateway(directory: Path) -> AsyncIterator[tuple[int, Callable[[], list[Any]]]]:
    """Yield the port of a gateway with the key `k`, and a function that lists the prompts that reached a model."""
    async with staged(directory, gateway={"endpoint": GatewayEndpoint(api_key="k")}) as stage:
        begun = stage.servers.begun
        yield int(stage.url.rpartition(":")[2]), lambda: [one for server in begun for one in server.asked]


class Connection:
    """Connection to a gateway. It keeps what arrives before a reset, which a stream of asyncio drops."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._unread = sock, b""

    @classmethod
    @asynccontextmanager
    async def open(cls, port: int) -> AsyncIterator[Connection]:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield cls(sock)

    async def send(self, *parts: bytes) -> None:
        """Send each part in a packet of its own, as long as the gateway takes them."""
        with suppress(OSError):
            for part in parts:
                await asyncio.get_running_loop().sock_sendall(self._socket, part)
                await asyncio.sleep(0)

    async def read_answer(self) -> tuple[int, bytes]:
        """Return status and body of the next answer; 0 at the end of the connection."""
        while True:
            head, end, rest = self._unread.partition(b"\r\n\r\n")
            if end:
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
                if len(rest) >= length:
                    self._unread = rest[length:]
                    return int(head.split(b" ", 2)[1]), rest[:length]
            try:
                found = await asyncio.get_running_loop().sock_recv(self._socket, 1 << 16)
            except OSError:
                found = b""
            if not found:
                return 0, b""
            self._unread += found

    async def read_answers(self) -> list[tuple[int, bytes]]:
        """Return all answers until the gateway ends the connection."""
        answers = []
        while (found := await self.read_answer())[0]:
            answers.append(found)
        return answers


async def send_parts(port: int, split: str, head: bytes, rest: bytes) -> list[tuple[int, bytes]]:
    """Send a request and return all answers until the gateway ends the connection.

    `rest` is sent in the packet of the head, or after the first answer; with "bytes" the head arrives byte by byte.
    """
    async with Connection.open(port) as client:
        if split == "together":
            await client.send(head + rest)
            return await client.read_answers()
        await client.send(*([head] if split == "later" else [head[n : n + 1] for n in range(len(head))]))
        first = await client.read_answer()
        await client.send(rest)
        return [first, *await client.read_answers()]


async def attack(directory: Path, head: bytes, rest: bytes = SMUGGLED) -> None:
    """Send an ambiguous request: its only answer is 400, no prompt reaches a model, and the gateway serves others."""
    async with open_gateway(directory) as (port, list_asked):
        for split in SPLITS:
            found = await send_parts(port, split, head, rest)
            assert (split, [status for status, _ in found], list_asked()) == (split, [400], [])
            assert json.loads(found[0][1])["error"]["code"] == 400
        assert (await send_parts(port, "together", build_request(), b""))[0][0] == 200
        assert list_asked() == ["good"]


async def serve(directory: Path, data: bytes) -> None:
    """Send a valid request in 1, 2, 3 and many parts over one connection: each time it reaches a model with its body."""
    async with open_gateway(directory) as (port, list_asked), Connection.open(port) as client:
        for number, pieces in enumerate((1, 2, 3, len(data)), 1):
            size = -(-len(data) // pieces)
            await client.send(*(data[start : start + size] for start in range(0, len(data), size)))
            status, body = await client.read_answer()
            assert (pieces, status, json.loads(body)["text"][0]) == (pieces, 200, "good")
            assert list_asked() == ["good"] * number


UPGRADES = {
    "any protocol": b"connection: upgrade\r\nupgrade: x\r\n",
    "websocket": b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n",
    "http/2 by name": b"connection: upgrade\r\nupgrade: h2\r\n",
    "several protocols": b"connection: upgrade\r\nupgrade: h2c, x\r\n",
    "two headers": b"connection: upgrade\r\nupgrade: x\r\nupgrade: h2c\r\n",
    "two connections": b"connection: upgrade\r\nconnection: keep-alive\r\nupgrade: x\r\n",
    "of a proxy": b"proxy-connection: upgrade\r\nupgrade: x\r\n",
}


@pytest.mark.parametrize("fields", UPGRADES.values(), ids=UPGRADES)
async def test_body_of_an_upgrade_is_no_request(tmp_path: Path, fields: bytes) -> None:
    await attack(tmp_path, POST + TYPE + fields + LENGTH + b"\r\n")


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/ui", "/unknown"])
async def test_upgrade_on_an_open_or_unknown_path_is_refused(tmp_path: Path, path: str) -> None:
    head = b"GET %b HTTP/1.1\r\nhost: localhost\r\n" % path.encode()
    await attack(tmp_path, head + UPGRADES["any protocol"] + LENGTH + b"\r\n")


async def test_request_of_the_next_client_is_not_completed_by_a_body(tmp_path: Path) -> None:
    """The attacker's body is the beginning of a request; the next client's head would add its key."""
    begun = POST + b"connection: close\r\n" + TYPE + b"content-length: %d\r\nx: " % len(GOOD)
    head = POST + UPGRADES["any protocol"] + b"content-length: %d\r\n\r\n" % len(begun)
    await attack(tmp_path, head, begun + POST + KEY + b"\r\n" + GOOD)


OFFERS = {
    "of Java": b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAA\r\nUpgrade: h2c\r\n",
    "of Apache": b"Upgrade: TLS/1.2\r\nConnection: Upgrade\r\n",
}


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("fields", OFFERS.values(), ids=OFFERS)
async def test_offer_of_another_protocol_is_served(tmp_path: Path, fields: bytes, chunked: bool) -> None:
    data = build_request(more=fields)
    if chunked:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD), GOOD)
        data = POST + fields + KEY + TYPE + CHUNKED + b"\r\n" + body
    await serve(tmp_path, data)


async def test_offers_that_wait_for_their_turn_are_answered_in_order(tmp_path: Path) -> None:
    async with open_gateway(tmp_path) as (port, list_asked):
        offers = [build_request(str(number), more=OFFERS["of Java"]) for number in range(8)]
        found = await send_parts(port, "together", b"".join(offers), build_request())
        assert [status for status, _ in found] == [200] * 9
        assert list_asked() == [*map(str, range(8)), "good"]


async def test_settings_of_another_protocol_are_not_forwarded(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        port = int(stage.url.rpartition(":")[2])
        data = build_request(more=OFFERS["of Java"] + b"x-kept: 1\r\n")
        async with Connection.open(port) as client:
            await client.send(data)
            assert (await client.read_answer())[0] == 200
        [sent] = stage.servers.last("a").headers
        assert sent["x-kept"] == "1" and not {"upgrade", "http2-settings"} & set(sent)


AMBIGUOUS = {
    "two hosts": POST + b"host: other\r\n" + KEY,
    "two equal hosts": POST + b"Host: localhost\r\n" + KEY,
    "two keys": POST + KEY + b"Authorization: Bearer other\r\n",
    "two equal keys": POST + KEY + KEY,
    "two keys of Anthropic's clients": POST + b"x-api-key: k\r\nX-Api-Key: j\r\n",
    "two admin keys": POST + KEY + b"x-coldstart-admin-key: a\r\nx-coldstart-admin-key: b\r\n",
    "two origins": POST + KEY + b"origin: http://a\r\norigin: http://b\r\n",
    "two lengths": POST + KEY + b"content-length: 0\r\n" + LENGTH,
    "two equal lengths": POST + KEY + LENGTH + LENGTH,
    "a list of lengths": POST + KEY + b"content-length: 0, 5\r\n",
    "a list of equal lengths": POST + KEY + b"content-length: 0, 0\r\n",
    "a signed length": POST + KEY + b"content-length: +0\r\n",
    "a negative length": POST + KEY + b"content-length: -1\r\n",
    "a hexadecimal length": POST + KEY + b"content-length: 0x0\r\n",
    "an empty length": POST + KEY + b"content-length:\r\n",
    "a length too large for 64 bits": POST + KEY + b"content-length: 18446744073709551616\r\n",
    "chunks and a length": POST + KEY + CHUNKED + b"content-length: 5\r\n",
    "a length and chunks": POST + KEY + b"content-length: 5\r\n" + CHUNKED,
    "identity and a length": POST + KEY + b"transfer-encoding: identity\r\ncontent-length: 0\r\n",
    "identity": POST + KEY + b"transfer-encoding: identity\r\n",
    "chunks twice": POST + KEY + CHUNKED + CHUNKED,
    "compressed chunks": POST + KEY + b"transfer-encoding: gzip, chunked\r\n",
    "compressed chunks in two headers": POST + KEY + b"transfer-encoding: gzip\r\n" + CHUNKED,
    "chunks that are not last": POST + KEY + b"transfer-encoding: chunked, identity\r\n",
    "chunks after an empty coding": POST + KEY + b"transfer-encoding: , chunked\r\n",
    "chunks with a parameter": POST + KEY + b"transfer-encoding: chunked;q=1\r\n",
    "almost chunks": POST + KEY + b"transfer-encoding: xchunked\r\n",
    "chunks after a vertical tab": POST + KEY + b"transfer-encoding: \x0bchunked\r\n",
    "a space before a colon": POST + KEY + b"transfer-encoding : chunked\r\n",
    "a space before a name": b"POST /v1/completions HTTP/1.1\r\n host: localhost\r\n" + KEY,
    "a folded header": POST + KEY + b"x: y\r\n transfer-encoding: chunked\r\n",
    "a folded empty header": POST + KEY + b"x:\r\n\tchunked\r\n",
    "a bare line feed": POST + KEY + b"x: y\ntransfer-encoding: chunked\r\n",
    "a bare carriage return": POST + KEY + b"x: y\rtransfer-encoding: chunked\r\n",
    "a NUL in a value": POST + KEY + b"x: a\0b\r\n",
    "a NUL in a name": POST + KEY + b"x\0y: a\r\n",
    "a header without a name": POST + KEY + b": a\r\n",
    "a line without a colon": POST + KEY + b"chunked\r\n",
    "no host": POST.replace(b"host: localhost\r\n", b"") + KEY,
    "HTTP/0.9": POST.replace(b"1.1", b"0.9") + KEY,
    "HTTP/2.0": POST.replace(b"1.1", b"2.0") + KEY,
    "HTTP/1.0 with chunks": POST.replace(b"1.1", b"1.0") + KEY + b"connection: keep-alive\r\n" + CHUNKED,
    "HTTP/1.0 with an upgrade": POST.replace(b"1.1", b"1.0") + UPGRADES["any protocol"] + LENGTH,
    "HTTP/1.0 with an offer": POST.replace(b"1.1", b"1.0") + OFFERS["of Java"] + LENGTH,
    "no version": POST.replace(b" HTTP/1.1", b"") + KEY,
    "CONNECT": b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost:80\r\n" + LENGTH,
    "CONNECT with an offer": b"CONNECT /v1/models HTTP/1.1\r\nhost: x\r\n" + OFFERS["of Java"] + LENGTH,
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n",
    "another host in the target": POST.replace(b" /", b" http://other/")
    + KEY
    + TYPE
    + b"content-length: 0\r\n",
    "a login in the target": POST.replace(b" /", b" http://x@localhost/") + KEY + b"content-length: 0\r\n",
    "no path": b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\n" + KEY,
    "a space in the target": POST.replace(b"completions", b"completions x") + KEY,
}


@pytest.mark.parametrize("head", AMBIGUOUS.values(), ids=AMBIGUOUS)
async def test_ambiguous_head_ends_its_connection(tmp_path: Path, head: bytes) -> None:
    await attack(tmp_path, head + b"\r\n")


BROKEN_CHUNKS = {
    "a hexadecimal prefix": b"0x1\r\nx\r\n",
    "a sign": b"+1\r\nx\r\n",
    "a space": b"1 \r\nx\r\n",
    "no size": b"\r\nx\r\n",
    "a size too large for 64 bits": b"10000000000000001\r\nx\r\n",
    "a line feed after the size": b"1\nx\r\n",
    "a line feed in an extension": b"1;a\nx\r\n",
    "a carriage return in an extension": b"1;a\rb\r\nx\r\n",
    "a line feed in a quoted extension": b'1;a="\n"\r\nx\r\n',
    "a line feed after the data": b"1\r\nx\n",
    "no end of the data": b"1\r\nx0\r\n\r\n",
    "more data": b"1\r\nxyz0\r\n",
    "a line feed at the end": b"0\r\n\n",
}


@pytest.mark.parametrize("chunk", BROKEN_CHUNKS.values(), ids=BROKEN_CHUNKS)
async def test_broken_chunk_ends_its_connection(tmp_path: Path, chunk: bytes) -> None:
    await attack(tmp_path, POST + KEY + TYPE + CHUNKED + b"\r\n" + chunk, b"0\r\n\r\n" + SMUGGLED)


TRAILERS = {
    "host": b"host: other\r\n",
    "authorization": b"authorization: Bearer other\r\n",
    "x-api-key": b"x-api-key: other\r\n",
    "origin": b"origin: http://other.example\r\n",
    "x-request-id": b"x-request-id: other\r\n",
    "content-type": b"content-type: text/plain\r\n",
    "x-forwarded": b"x-forwarded: other\r\n",
    "upgrade": UPGRADES["any protocol"],
    "expect": b"expect: 100-continue\r\n",
}


@pytest.mark.parametrize("key", [True, False], ids=["with a key", "without a key"])
@pytest.mark.parametrize("trailer", TRAILERS.values(), ids=TRAILERS)
async def test_trailer_changes_nothing(tmp_path: Path, trailer: bytes, key: bool) -> None:
    endpoint = GatewayEndpoint(api_key="k" if key else None)
    async with staged(tmp_path, gateway={"endpoint": endpoint}) as stage:
        port = int(stage.url.rpartition(":")[2])
        head = POST + (KEY if key else b"") + TYPE + b"x-request-id: mine\r\n" + CHUNKED + b"\r\n"
        async with Connection.open(port) as client:
            for _ in range(2):
                await client.send(head + b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(GOOD), GOOD, trailer))
                assert (await client.read_answer())[0] == 200
        for sent in stage.servers.last("a").headers:
            assert sent["x-request-id"] == "mine" and "other" not in str(sent)


@pytest.mark.parametrize("name", [b"authorization: Bearer k", b"x-api-key: k", b"host: localhost"])
async def test_trailer_adds_no_rights(tmp_path: Path, name: bytes) -> None:
    async with open_gateway(tmp_path) as (port, list_asked):
        head = POST + TYPE + CHUNKED + b"\r\n%x\r\n%b\r\n0\r\n" % (len(GOOD), GOOD)
        found = await send_parts(port, "together", head + name + b"\r\n\r\n", build_request("next"))
        assert [status for status, _ in found] == [401, 200]
        assert list_asked() == ["next"]


VALID = {
    "HTTP/1.1": build_request(more=b"x: y\r\n"),
    "another case": build_request(more=b"Connection: Keep-Alive\r\n").replace(b"host", b"HOST"),
    "an address as the target": build_request(more=b"x: y\r\n").replace(b" /", b" http://LOCALHOST/", 1),
    "spaces around values": build_request(more=b"x: y\r\n").replace(b"length: ", b"length:\t ", 1),
    "an upgrade without a connection": build_request(more=b"upgrade: x\r\n"),
    "a connection without an upgrade": build_request(more=b"connection: upgrade\r\n"),
    "an empty upgrade": build_request(more=b"connection: upgrade\r\nupgrade:\r\n"),
    "an empty line first": b"\r\n" + build_request(more=b"x: y\r\n"),
}


@pytest.mark.parametrize("data", VALID.values(), ids=VALID)
async def test_unambiguous_request_is_served(tmp_path: Path, data: bytes) -> None:
    await serve(tmp_path, data)
