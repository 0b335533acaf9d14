"""A registry that sends endless or very slow responses costs a pull neither much memory nor much time."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from coldstart.artifacts import oci, remote
from coldstart.artifacts.store import Store
from tools.bundles import publish
from tools.raw_server import Asked, answer, answering, dribble, flood, say

_PULL = """
import sys
from pathlib import Path
from coldstart.artifacts import remote
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.store import Store
try:
    remote.pull(Store(Path(sys.argv[1])), sys.argv[2])
except BundleError as error:
    print(error.code, error.message)
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""
_LENGTH = 900 << 20
_RSS_KIB = 200 << 10


def _pull(address: str, place: Path, seconds: float) -> tuple[str, float]:
    """Return output and duration of a pull; fail if it takes longer than `seconds` or more than 200 MiB of memory."""
    environment = {**os.environ, "COLDSTART_HTTP_PATIENCE_S": "1", "HOME": str(place.parent)}
    began = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-c", _PULL, str(place), address], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        said, _ = child.communicate(timeout=seconds)
    finally:
        child.kill()
        child.wait()
    said, _, peak = said.rstrip().rpartition("\n")
    assert int(peak) < _RSS_KIB, f"{peak} KiB"
    return said, time.monotonic() - began


def _large(connection: socket.socket, status: int, kind: str = "text/plain") -> None:
    head = f"HTTP/1.1 {status} Said\r\nContent-Type: {kind}\r\nContent-Length: {_LENGTH}\r\n\r\n"
    connection.sendall(head.encode())
    flood(connection, b'{"token":"' + b"x" * (1 << 20), _LENGTH)


def _challenge(connection: socket.socket, asked: Asked) -> None:
    if asked.path.startswith("/token"):
        _large(connection, 200, "application/json")
    else:
        answer(connection, 401, {"WWW-Authenticate": f'Bearer realm="http://{asked.headers["host"]}/token"'})


@pytest.mark.parametrize(
    "behave",
    [
        lambda c, _: _large(c, 500),
        lambda c, _: _large(c, 403),
        lambda c, _: _large(c, 404),
        lambda c, _: _large(c, 401),
        lambda c, _: _large(c, 200),
        _challenge,
    ],
    ids=["500", "403", "404", "401", "200", "token"],
)
def test_pull_bounds_memory_when_response_is_large(
    behave: Callable[[socket.socket, Asked], None], tmp_path: Path
) -> None:
    with answering(behave) as server:
        said, _ = _pull(f"oci://{server.address}/a/b", tmp_path / "store", 60)
    assert said.startswith("CS-"), said


def _no_end(head: bytes) -> Callable[[socket.socket, Asked], None]:
    def behave(connection: socket.socket, _: Asked) -> None:
        connection.sendall(head)
        dribble(connection, b"x", 0.3)

    return behave


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nX: ",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n{",
        b"HTTP/1.1 500 Oops\r\nContent-Length: 100000\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\n",
    ],
    ids=["status", "headers", "header", "body", "error", "chunk"],
)
def test_pull_ends_when_response_trickles(head: bytes, tmp_path: Path) -> None:
    with answering(_no_end(head)) as server:
        said, seconds = _pull(f"oci://{server.address}/a/b", tmp_path / "store", 60)
    assert said.startswith("CS-REMOTE"), said
    assert seconds < 30


def test_pull_limits_the_number_of_signatures(tmp_path: Path) -> None:
    made = publish(Store(tmp_path / "made"), tmp_path)
    listed = [
        {"mediaType": oci.MANIFEST_TYPE, "digest": f"sha256:{number:064x}", "size": 700}
        | {"artifactType": oci.SIGNATURE_TYPE}
        for number in range(2000)
    ]
    index = json.dumps({"schemaVersion": 2, "mediaType": oci.INDEX_TYPE, "manifests": listed}).encode()

    def registry(connection: socket.socket, asked: Asked) -> None:
        last = asked.path.rpartition("/")[2]
        blob = tmp_path / "made" / "blobs" / "sha256" / last.partition(":")[2]
        if "/referrers/" in asked.path:
            answer(connection, 200, {"Content-Type": oci.INDEX_TYPE}, index)
        elif last == "latest":
            answer(connection, 200, {}, made.image_bytes())
        elif blob.exists():
            answer(connection, 200, {}, blob.read_bytes())
        else:
            say(connection, {"errors": []}, 404)

    with answering(registry) as server:
        pulled = remote.pull(Store(tmp_path / "store"), f"oci://{server.address}/a/b")
        assert pulled == made
        asked = [one for one in server.asked if one.path.rpartition(":")[2].startswith("000000")]
        assert len(asked) <= 64
