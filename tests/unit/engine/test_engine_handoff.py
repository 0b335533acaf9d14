"""One request with its descriptors arrives whole, or is refused and leaves nothing open."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from pathlib import Path

import pytest

from coldstart.serve import handoff

Pair = tuple[socket.socket, socket.socket]
REQUEST = {"plan": {"vllm_args": ["--model", "ü"]}, "cwd": "/", "env": {"A": "b" * 5000}}


def opened() -> set[str]:
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208


def framed(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


def test_a_request_arrives_with_its_descriptors(pair: Pair, tmp_path: Path) -> None:
    client, server = pair
    with (tmp_path / "log").open("w") as log:
        handoff.send(client, REQUEST, (log.fileno(), log.fileno()))
    received, descriptors = handoff.receive(server)
    assert received == REQUEST and len(descriptors) == 2
    os.write(descriptors[0], b"one ")
    os.write(descriptors[1], b"two")
    for descriptor in descriptors:
        os.close(descriptor)
    assert (tmp_path / "log").read_text() == "one two"
    assert server.gettimeout() is None


def test_a_large_request_arrives_in_many_pieces(pair: Pair) -> None:
    client, server = pair
    request = {"env": {"A": "x" * (handoff.MAX_REQUEST - 100)}}
    sender = threading.Thread(target=handoff.send, args=(client, request))
    sender.start()
    assert handoff.receive(server) == (request, [])
    sender.join()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\0\0",
        framed(b"{" + b" " * 10)[:9],
        framed(b"no json"),
        framed(b"\xff\xfe{}"),
        framed(b"[1]"),
        framed(b"null"),
        struct.pack("!I", handoff.MAX_REQUEST + 1) + b"{}",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_a_malformed_request_is_refused_and_its_descriptors_are_closed(pair: Pair, sent: bytes) -> None:
    client, server = pair
    if sent:
        socket.send_fds(client, [sent], [0, 1, 2])
    client.shutdown(socket.SHUT_WR)
    before = opened()
    with pytest.raises(handoff.HandoffError):
        handoff.receive(server)
    assert opened() == before


def test_who_connects_and_says_nothing_is_not_waited_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "PATIENCE_S", 0.05)
    with pytest.raises(handoff.HandoffError, match="timed out"):
        handoff.receive(pair[1])


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(handoff.HandoffError, match="no template listens at"):
        handoff.connect(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(handoff.HandoffError, match="no template listens at"):
        handoff.connect(tmp_path / "file")


def test_only_this_user_reaches_the_socket(home: Path) -> None:
    with handoff.listen(home / "sub" / "socket"):
        assert (home / "sub" / "socket").stat().st_mode & 0o777 == 0o600
        assert (home / "sub").stat().st_mode & 0o777 == 0o700
        with handoff.connect(home / "sub" / "socket") as client:
            assert handoff.peer_uid(client) == os.getuid()


def test_a_template_of_another_user_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with handoff.listen(home / "socket"):
        monkeypatch.setattr(handoff, "peer_uid", lambda _: os.getuid() + 1)
        with pytest.raises(handoff.HandoffError, match="belongs to another user"):
            handoff.connect(home / "socket")


def test_a_new_listener_takes_the_place_of_a_dead_one(home: Path) -> None:
    handoff.listen(home / "socket").close()
    with handoff.listen(home / "socket"), handoff.connect(home / "socket"):
        pass


def test_sending_to_a_template_that_went_away(pair: Pair) -> None:
    client, server = pair
    server.close()
    with pytest.raises(handoff.HandoffError, match="does not take the request"):
        handoff.send(client, REQUEST)


def test_replies_end_with_the_connection(pair: Pair) -> None:
    client, server = pair
    handoff.reply(server, pid=1)
    handoff.reply(server, exit=0)
    server.close()
    assert list(handoff.replies(client)) == [{"pid": 1}, {"exit": 0}]


def test_replies_end_when_the_template_is_killed_before_it_has_read_everything(pair: Pair) -> None:
    client, server = pair
    client.send(b"T")
    server.close()  # with a byte unread, which is a reset for the other end
    assert list(handoff.replies(client)) == []


def test_a_reply_to_nobody_is_no_error_and_keeps_the_lease_readable(pair: Pair) -> None:
    client, server = pair
    client.close()
    handoff.reply(server, pid=1)
    assert server.recv(1) == b""


def test_a_request_is_plain_json(pair: Pair) -> None:
    client, server = pair
    handoff.send(client, REQUEST)
    raw = server.recv(1 << 20)
    assert json.loads(raw[4:]) == REQUEST
