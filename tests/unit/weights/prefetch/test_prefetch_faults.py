"""Servers that die, bytes that are wrong, prefetchers that are killed, memory that is short."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from support.prefetching import CHUNK, Weights, check_tensors, check_whole
from support.range_server import FOREVER, RangeServer

from coldstart.weights.checkpoint import list_tensors
from coldstart.weights.load.ladder import LoadReport, Rung, load_tensors
from coldstart.weights.load.tensor_sources import FileSource, PrefetchSource
from coldstart.weights.prefetch import client

FILE = "model-00001.safetensors"
STREAMS = 4


def _total(weights: Weights) -> int:
    return sum(map(len, weights.data.values()))


def _pid(runtime: Path) -> int:
    (one,) = client.request("status", directory=runtime)
    return int(one["pid"])


def test_a_server_that_dies_and_returns(weights: Weights, server: RangeServer, runtime: Path) -> None:
    server.settings.rate = 1e6  # far from complete when the server dies
    with client.attach(server.url, weights.plan, directory=runtime) as attached:
        attached.wait(FILE, 0, 4 * CHUNK)
        server.down()
        server.settings.rate = None
        back = threading.Timer(0.5, server.up)
        back.start()
        check_whole(attached, weights)
        back.join()
        assert server.total() - _total(weights) <= STREAMS * CHUNK
        assert attached.stats()["errors"]


def test_a_wrong_byte_is_fetched_again_and_reported(
    weights: Weights, server: RangeServer, runtime: Path
) -> None:
    _, offset, _ = weights.tensor("a.20")
    server.settings.flips = [(FILE, offset + 5, 1)]
    with client.attach(server.url, weights.plan, directory=runtime) as attached:
        check_whole(attached, weights)
        (error,) = attached.stats()["errors"]
        assert f"{FILE}: tensor 'a.20' at offset {offset} does not match its digest" in error
        assert CHUNK >= attached.stats()["refetched"] > 0


@pytest.mark.parametrize("names", [None, ["a.20", "a.21"]])
def test_a_byte_that_stays_wrong_is_never_served(
    weights: Weights, server: RangeServer, runtime: Path, names: list[str] | None
) -> None:
    _, offset, size = weights.tensor("a.20")
    server.settings.flips = [(FILE, offset + size // 2, FOREVER)]
    with client.attach(server.url, weights.plan, names=names, directory=runtime) as attached:
        with pytest.raises(client.PrefetchFailedError, match=f"{FILE}: tensor 'a.20' at ") as caught:
            attached.wait(FILE, offset, size)
        assert "3 fetches" in str(caught.value)
        assert attached.file(FILE)[offset + size // 2] == 0
        check_tensors(attached, weights, ["a.40", "b.3"] if names is None else [])


def test_a_killed_prefetcher_is_noticed_at_once_and_replaced(
    weights: Weights, server: RangeServer, runtime: Path
) -> None:
    server.settings.rate = 2e6
    with client.attach(server.url, weights.plan, directory=runtime) as attached:
        attached.wait(FILE, 0, CHUNK)
        os.kill(_pid(runtime), signal.SIGKILL)
        with pytest.raises(client.PrefetchLostError):
            attached.wait("model-00002.safetensors", 0, 1)
        with pytest.raises(client.PrefetchLostError):
            attached.stats()
        assert attached.file(FILE)[:CHUNK] == weights.data[FILE][:CHUNK]
    server.settings.rate = None
    with client.attach(server.url, weights.plan, directory=runtime) as again:
        check_whole(again, weights)
    assert {path.suffix for path in runtime.iterdir()} == {".socket", ".lock", ".log"}


def test_too_little_memory_is_refused(
    weights: Weights, server: RangeServer, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLDSTART_PREFETCH_MEMORY_BYTES", str(_total(weights) - 1))
    with pytest.raises(client.PrefetchRefusedError, match=f"needs {_total(weights)} bytes"):
        client.attach(server.url, weights.plan, directory=runtime)
    with client.attach(server.url, weights.plan, names=["a.3"], directory=runtime) as attached:
        check_tensors(attached, weights, ["a.3"])
        with pytest.raises(client.PrefetchRefusedError):
            client.attach(server.url, weights.plan, directory=runtime)
        check_tensors(attached, weights, ["a.3"])


def test_failed_start_of_the_prefetcher_is_reported(
    weights: Weights, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLDSTART_PREFETCH_STREAMS", "many")
    with pytest.raises(client.PrefetchLostError, match="invalid COLDSTART_PREFETCH_STREAMS: 'many'"):
        client.attach("/nowhere", weights.plan, directory=runtime)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(client.PrefetchError, match="cannot find a directory for"):
        client.attach("/nowhere", weights.plan)


def test_load_continues_from_files_when_the_prefetcher_is_killed(
    weights: Weights, server: RangeServer, runtime: Path
) -> None:
    server.settings.rate = 1e6
    tensors, report = list_tensors(weights.plan), LoadReport()
    paths = {name: weights.directory / name for name in weights.data}
    rungs: list[Rung] = [
        ("prefetcher", lambda _: PrefetchSource(client.attach(server.url, weights.plan, directory=runtime))),
        ("files", lambda left: FileSource(paths, left)),
    ]
    loading = load_tensors(tensors, rungs, report)
    found = [next(loading)]
    os.kill(_pid(runtime), signal.SIGKILL)
    found += loading
    for tensor, view in found:
        assert view == weights.data[tensor.file][tensor.offset : tensor.end]
    assert [tensor for tensor, _ in found] == tensors and report.way == "files"
    (fallback,) = report.fallbacks
    assert "the prefetcher has exited" in fallback.reason
