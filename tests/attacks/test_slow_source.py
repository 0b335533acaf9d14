"""A weights server that sends one byte per second must not block a fetch for ever."""

from __future__ import annotations

import shutil
import socket
import time
from pathlib import Path

import pytest
from support.prefetching import checkpoint, prefetcher
from tools.raw_server import Asked, answering, dribble

from coldstart.weights.prefetch import client

pytestmark = pytest.mark.slow

_MEMORY = {"COLDSTART_PREFETCH_MEMORY_BYTES": 256 << 20}


def _send_a_byte_per_second(connection: socket.socket, asked: Asked) -> None:
    first, last = asked.headers["range"].removeprefix("bytes=").split("-")
    total = int(last) + 1
    head = f"HTTP/1.1 206 Partial\r\nContent-Length: {total - int(first)}\r\nContent-Range: bytes {first}-{last}/*\r\n\r\n"
    connection.sendall(head.encode())
    dribble(connection, b"x", 1.0)


def test_fetch_fails_when_source_is_too_slow(tmp_path: Path) -> None:
    plan = checkpoint(tmp_path / "w")
    settings = {"COLDSTART_PREFETCH_PATIENCE_S": 1, "COLDSTART_HTTP_PATIENCE_S": 1} | _MEMORY
    with (
        answering(_send_a_byte_per_second) as slow,
        prefetcher(tmp_path / "r", **settings) as runtime,
        client.attach(slow.url, plan, directory=runtime) as attached,
    ):
        began = time.monotonic()
        with pytest.raises(client.PrefetchFailedError, match="bytes"):
            attached.complete()
        assert time.monotonic() - began < 30


def test_fetch_fails_when_each_connection_sends_one_byte(tmp_path: Path) -> None:
    """Each connection makes progress of a single byte."""

    def behave(connection: socket.socket, asked: Asked) -> None:
        first, last = asked.headers["range"].removeprefix("bytes=").split("-")
        size = int(last) + 1 - int(first)
        head = f"HTTP/1.1 206 P\r\nContent-Length: {size}\r\nContent-Range: bytes {first}-{last}/*\r\n\r\nx"
        connection.sendall(head.encode())
        connection.shutdown(socket.SHUT_RDWR)

    plan = checkpoint(tmp_path / "w")
    settings = {"COLDSTART_PREFETCH_PATIENCE_S": 1, "COLDSTART_HTTP_PATIENCE_S": 1} | _MEMORY
    with (
        answering(behave) as slow,
        prefetcher(tmp_path / "r", **settings) as runtime,
        client.attach(slow.url, plan, directory=runtime) as attached,
        pytest.raises(client.PrefetchFailedError, match="arrives too slowly"),
    ):
        attached.complete()
    shutil.rmtree(tmp_path / "r")
