"""Messages arrive complete with their descriptors, or are refused without leaving descriptors open."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from coldstart.system.ipc import json_lines
from coldstart.system.ipc.json_lines import Channel, MalformedMessageError

Pair = tuple[Channel, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two connected sockets."""
    one, two = map(Channel, socket.socketpair())
    with one, two:
        yield one, two


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"", "truncated"),
        (b"\0\0", "truncated"),
        (b'{"a": 1}', "truncated"),
        (b"no json\n", "not JSON"),
        (b"\xff\xfe{}\n", "not JSON"),
        (b"[" * 100_000 + b"\n", "not JSON"),
        (b"[1]\n", "not a JSON object"),
        (b"null\n", "not a JSON object"),
        (b"{}\n{}\n", "more than one"),
        (b"{}\n{", "more than one"),
        (b"GET / HTTP/1.1\r\n\r\n", "not JSON"),
    ],
)
def test_a_malformed_request_is_refused_and_its_descriptors_are_closed(
    pair: Pair, sent: bytes, reason: str
) -> None:
    client, server = pair
    kept, given = socket.socketpair()
    with kept, given:
        if sent:
            socket.send_fds(client.socket, [sent], [given.fileno()] * 3)
        given.close()
        client.socket.shutdown(socket.SHUT_WR)
        with pytest.raises(MalformedMessageError, match=reason):
            server.request()
        server.close_descriptors()
        kept.setblocking(False)
        assert kept.recv(1) == b"", "the end of the stream: all copies are closed"


def test_a_request_that_is_too_large_is_refused_before_it_is_held(pair: Pair) -> None:
    client, server = pair
    sender = threading.Thread(target=_send_much, args=(client.socket,))
    sender.start()
    with pytest.raises(MalformedMessageError, match="exceeds 1048576 bytes"):
        server.request()
    server.close()
    sender.join()


def _send_much(connection: socket.socket) -> None:
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        connection.sendall(b"x" * (8 << 20))


def test_receive_fails_when_the_peer_is_silent_or_slow(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "PATIENCE_S", 0.2)
    ended = threading.Event()

    def trickle() -> None:
        while not ended.wait(0.05):
            pair[0].socket.send(b" ")

    slow = threading.Thread(target=trickle)
    slow.start()
    try:
        with pytest.raises(MalformedMessageError, match=r"no request within 0\.2 s"):
            pair[1].request()
    finally:
        ended.set()
        slow.join()


def test_too_many_descriptors_are_refused(pair: Pair) -> None:
    client, server = pair
    for _ in range(2):
        socket.send_fds(client.socket, [b" "], [0] * 5)
    with pytest.raises(MalformedMessageError, match="too many descriptors"):
        server.request()
