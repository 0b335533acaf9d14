"""Only this user's clients are accepted, and a shortage of descriptors neither spins nor delays clients."""

from __future__ import annotations

import os
import resource
import select
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coldstart.system.ipc import peers
from coldstart.system.ipc.peers import Listener, PeerError


@pytest.fixture
def home() -> Iterator[Path]:
    """A short path, because the length of Unix socket paths is limited."""
    root = Path(tempfile.mkdtemp(prefix="cs-"))
    yield root
    shutil.rmtree(root)


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def readable(listener: Listener) -> bool:
    return bool(select.select([listener], [], [], 0)[0])


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
            assert peers.peer_uid(client) == peers.peer_uid(accepted) == os.getuid()
            accepted.close()


def test_another_users_server_and_another_users_client_are_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Listener(home / "socket") as listener, peers.connect(home / "socket") as client:
        monkeypatch.setattr(peers, "peer_uid", lambda _: os.getuid() + 1)
        with pytest.raises(PeerError, match="another user"):
            peers.connect(home / "socket")
        assert listener.accept() is None
        assert client.recv(1) == b""


def test_clients_are_refused_without_descriptors(home: Path) -> None:
    with Listener(home / "socket") as listener:
        for _ in range(2):  # the reserve is restored
            with peers.connect(home / "socket") as client:
                with no_descriptors_left():
                    assert readable(listener)
                    assert listener.accept() is None
                    assert not readable(listener), "the loop would spin"
                assert client.recv(1) == b"", "the client is told"
        with peers.connect(home / "socket"):
            accepted = listener.accept()
            assert accepted is not None
            accepted.close()
