"""Messages arrive complete with their descriptors, or are refused without leaving descriptors open."""

import fcntl
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import exhaust_descriptors

from coldstart.system.ipc import json_lines, peers
from coldstart.system.ipc.json_lines import Channel, MalformedMessageError
from coldstart.system.ipc.peers import Listener, PeerError

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
def test_malformed_request_is_refused_with_descriptors_closed(pair: Pair, sent: bytes, reason: str) -> None:
    client, server = pair
    kept, given = socket.socketpair()
    with kept, given:
        if sent:
            socket.send_fds(client.socket, [sent], [given.fileno()] * 3)
        given.close()
        client.socket.shutdown(socket.SHUT_WR)
        with pytest.raises(MalformedMessageError, match=reason):
            server.receive_request()
        server.close_descriptors()
        kept.setblocking(False)
        assert kept.recv(1) == b"", "the end of the stream: all copies are closed"


def test_a_request_that_is_too_large_is_refused_before_it_is_held(pair: Pair) -> None:
    client, server = pair
    sender = threading.Thread(target=_send_much, args=(client.socket,))
    sender.start()
    with pytest.raises(MalformedMessageError, match="more than 1048576 bytes"):
        server.receive_request()
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
            pair[1].receive_request()
    finally:
        ended.set()
        slow.join()


def test_too_many_descriptors_are_refused(pair: Pair) -> None:
    client, server = pair
    for _ in range(2):
        socket.send_fds(client.socket, [b" "], [0] * 5)
    with pytest.raises(MalformedMessageError, match="too many file descriptors"):
        server.receive_request()


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 1024, reason="too few descriptors")
def test_a_process_with_many_open_files_can_wait(pair: Pair) -> None:
    with Channel(socket.socket(fileno=fcntl.fcntl(pair[1], fcntl.F_DUPFD, 1024))) as server:
        pair[0].send({"a": 1})
        assert peers.await_readable(pair[1], server) == [pair[1], server]
        assert server.receive_request() == {"a": 1}


@pytest.mark.parametrize("length", [107, 108, 300])
def test_a_path_of_any_length_has_a_socket(home: Path, length: int) -> None:
    directory = home
    while (left := length - len(os.fsencode(directory / "é/s")) - 1) > 0:
        directory /= "x" * min(left, 200)
    path = directory / "é" / "s"
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    with Listener(path) as listener, peers.connect(path):
        accepted = listener.accept()
        assert accepted is not None and path.stat().st_mode & 0o777 == 0o600
        accepted.close()
    assert len(os.listdir("/proc/self/fd")) <= len(before)  # noqa: PTH208 - those of earlier tests may be closed


def test_only_this_user_reaches_the_socket(home: Path) -> None:
    with Listener(home / "sub" / "socket") as listener:
        assert (home / "sub" / "socket").stat().st_mode & 0o777 == 0o600
        assert (home / "sub").stat().st_mode & 0o777 == 0o700
        with peers.connect(home / "sub" / "socket") as client:
            accepted = listener.accept()
            assert accepted is not None and accepted.getblocking()
            assert peers.read_peer_uid(client) == peers.read_peer_uid(accepted) == os.getuid()
            accepted.close()


def test_server_and_client_of_another_user_are_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Listener(home / "socket") as listener, peers.connect(home / "socket") as client:
        monkeypatch.setattr(peers, "read_peer_uid", lambda _: os.getuid() + 1)
        with pytest.raises(PeerError, match="another user"):
            peers.connect(home / "socket")
        assert listener.accept() is None
        assert client.recv(1) == b""


def test_clients_are_refused_without_descriptors(home: Path) -> None:
    with Listener(home / "socket") as listener:
        for _ in range(2):  # the reserve is restored
            with peers.connect(home / "socket") as client:
                with exhaust_descriptors(os.getpid()):
                    assert peers.await_readable(listener)
                    assert listener.accept() is None
                    assert not peers.await_readable(listener, timeout_s=0), "the loop would spin"
                assert client.recv(1) == b"", "the client is told"
        with peers.connect(home / "socket"):
            accepted = listener.accept()
            assert accepted is not None
            accepted.close()


def test_close_listening_sockets_leaves_other_descriptors_open(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as two,
        socket.socket(socket.AF_UNIX) as local,
        socket.create_connection(one.getsockname()) as connected,
    ):
        local.bind(str(tmp_path / "socket"))
        local.listen()
        ports = [held.getsockname() for held in (one, two)]
        numbers = [held.fileno() for held in (one, two)]
        code = (
            "import os, socket, sys\n"
            "from coldstart.system.ipc import addresses\n"
            "numbers = [int(word) for word in sys.argv[1:]]\n"
            "print(addresses.close_listening_sockets(), all(os.readlink(f'/proc/self/fd/{n}') == 'anon_inode:[eventfd]' for n"
            " in numbers[:2]), [socket.socket(fileno=n).getsockname() != '' for n in numbers[2:]])\n"
        )
        kept = [local.fileno(), connected.fileno()]
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, numbers + kept)],
            pass_fds=numbers + kept,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == "2 True [True, True]\n"
    # No other process holds the ports, so they can be bound again.
    for family, address in zip((socket.AF_INET, socket.AF_INET6), ports, strict=True):
        socket.create_server(address[:2], family=family).close()
