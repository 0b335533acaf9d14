"""Directory of the fleet's Ray cluster: socket paths must fit into the address of a Unix socket."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest

from coldstart.errors import UsageError
from coldstart.fleet.live import ray_process
from coldstart.fleet.specification import ServerSpec

SERVER = ServerSpec("server", 24 * 10**9, 6.7e9, 12e9, 4)


def test_a_server_is_known_by_its_labels() -> None:
    given = ray_process.format_labels(SERVER)
    assert all(len(value) <= 63 and value.isdigit() for value in given.values())
    assert ray_process.parse_labels("server", given) == SERVER
    assert ray_process.parse_labels("head", {"ray.io/node-id": "x"}) is None
    with pytest.raises(UsageError, match="invalid server labels"):
        ray_process.parse_labels("x", {**given, "coldstart-load": "fast"})


@pytest.mark.parametrize("deep", ["", "a" * 40])
def test_own_directory_is_short_enough_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deep: str
) -> None:
    wanted = tmp_path / deep if deep else Path("/tmp")
    wanted.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(wanted))
    made = ray_process.create_private_directory()
    session = made / "r" / "session_2026-11-22_16-13-30_677596_18330" / "sockets"
    try:
        assert made.stat().st_mode & 0o777 == 0o700
        session.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(session / "plasma_store"))  # the kernel checks the length
    finally:
        for path in (session / "plasma_store", session, session.parent, session.parent.parent, made):
            path.unlink() if path.is_socket() else path.rmdir()
