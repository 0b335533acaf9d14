"""A weights server that sends one byte per second must not block the prefetcher for other models."""

from __future__ import annotations

import os
import shutil
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.range_server import serving
from tools.raw_server import Asked, answering, dribble
from weights_tools import FILE, checkpoint, prefetcher

from coldstart.weights.prefetch import client

pytestmark = pytest.mark.slow

MODELS = 19
_MEMORY = {"COLDSTART_PREFETCH_MEMORY_BYTES": 256 << 20}


def _send_a_byte_per_second(connection: socket.socket, asked: Asked) -> None:
    first, last = asked.headers["range"].removeprefix("bytes=").split("-")
    total = int(last) + 1
    head = f"HTTP/1.1 206 Partial\r\nContent-Length: {total - int(first)}\r\nContent-Range: bytes {first}-{last}/*\r\n\r\n"
    connection.sendall(head.encode())
    dribble(connection, b"x", 1.0)


def _stay_silent(connection: socket.socket, asked: Asked) -> None:
    time.sleep(60)


@pytest.mark.parametrize(
    "behave", [_send_a_byte_per_second, _stay_silent], ids=["a byte a second", "no answer"]
)
def test_models_are_not_delayed_by_one_slow_source(behave: object, tmp_path: Path) -> None:
    """The other models arrive as fast as without it, plus a margin for a busy machine."""
    plan = checkpoint(tmp_path / "w" / "m0")
    for number in range(1, MODELS):
        (tmp_path / "w" / f"m{number}").mkdir()
        os.link(tmp_path / "w" / "m0" / FILE, tmp_path / "w" / f"m{number}" / FILE)
    with serving(tmp_path / "w") as server, answering(behave) as slow:  # type: ignore[arg-type]

        def fetch(runtime: Path, hindered: bool) -> float:
            with ExitStack() as leases:
                client.attach(f"{server.url}/m0", plan, names=[], directory=runtime).close()  # it runs
                if hindered:
                    leases.enter_context(client.attach(slow.url, plan, directory=runtime))
                    while not slow.asked:
                        time.sleep(0.01)
                began = time.monotonic()
                opened = [
                    leases.enter_context(client.attach(f"{server.url}/m{n}", plan, directory=runtime))
                    for n in range(MODELS)
                ]
                for attached in opened:
                    attached.complete()
                return time.monotonic() - began

        with prefetcher(tmp_path / "r1", **_MEMORY) as runtime:
            alone = fetch(runtime, hindered=False)
        with prefetcher(tmp_path / "r2", **_MEMORY) as runtime:
            beside = fetch(runtime, hindered=True)
        assert beside - alone < 20.0, (alone, beside)


def test_model_is_not_delayed_by_many_slow_sources(tmp_path: Path) -> None:
    """Twelve slow servers do not delay another model either."""
    plan = checkpoint(tmp_path / "w")
    with (
        serving(tmp_path / "w") as server,
        answering(_send_a_byte_per_second) as slow,
        prefetcher(tmp_path / "r", **_MEMORY) as runtime,
        ExitStack() as leases,
    ):
        for number in range(12):
            leases.enter_context(client.attach(f"{slow.url}/{number}", plan, directory=runtime))
        while not slow.asked:
            time.sleep(0.01)
        began = time.monotonic()
        with client.attach(server.url, plan, directory=runtime) as attached:
            attached.complete()
        assert time.monotonic() - began < 20.0


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
        pytest.raises(client.PrefetchFailedError),
    ):
        attached.complete()
    shutil.rmtree(tmp_path / "r")
