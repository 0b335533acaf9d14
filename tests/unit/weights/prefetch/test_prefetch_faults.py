"""Servers that die, bytes that are wrong, prefetchers that are killed, memory that is short."""

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from support.prefetching import CHUNK, Weights, check_tensors, check_whole, status
from support.processes import wait_until
from support.range_server import FOREVER, RangeServer

from coldstart.weights.checkpoint import list_tensors
from coldstart.weights.load.ladder import LoadReport, Rung, load_tensors
from coldstart.weights.load.tensor_sources import FileSource, PrefetchSource
from coldstart.weights.prefetch import PrefetchFailedError, client

FILE = "model-00001.safetensors"
STREAMS = 4


def _total(weights: Weights) -> int:
    return sum(map(len, weights.data.values()))


def test_a_server_that_dies_and_returns(weights: Weights, server: RangeServer, runtime: Path) -> None:
    server.settings.rate = 1e6  # far from complete when the server dies
    with client.attach(server.url, weights.plan, directory=runtime) as attached:
        attached.wait_for_bytes(FILE, 0, 4 * CHUNK)
        server.down()
        server.settings.rate = None
        back = threading.Timer(0.5, server.up)
        back.start()
        check_whole(attached, weights)
        back.join()
        assert server.total() - _total(weights) <= STREAMS * CHUNK
        assert attached.query_stats()["errors"]


def test_wrong_byte_is_refetched_and_reported(weights: Weights, server: RangeServer, runtime: Path) -> None:
    _, offset, _ = weights.tensor("a.20")
    server.settings.flips = [(FILE, offset + 5, 1)]
    with client.attach(server.url, weights.plan, directory=runtime) as attached:
        check_whole(attached, weights)
        (error,) = attached.query_stats()["errors"]
        assert f"{FILE}: tensor 'a.20' at offset {offset} does not match its digest" in error
        assert CHUNK >= attached.query_stats()["refetched"] > 0


@pytest.mark.parametrize("names", [None, ["a.20", "a.21"]])
def test_a_byte_that_stays_wrong_is_never_served(
    weights: Weights, server: RangeServer, runtime: Path, names: list[str] | None
) -> None:
    _, offset, size = weights.tensor("a.20")
    server.settings.flips = [(FILE, offset + size // 2, FOREVER)]
    with client.attach(server.url, weights.plan, names=names, directory=runtime) as attached:
        with pytest.raises(PrefetchFailedError, match=f"{FILE}: tensor 'a.20' at ") as caught:
            attached.wait_for_bytes(FILE, offset, size)
        assert "3 fetches" in str(caught.value)
        assert attached.map_file(FILE)[offset + size // 2] == 0
        check_tensors(attached, weights, ["a.40", "b.3"] if names is None else [])


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
    with pytest.raises(client.PrefetchLostError, match="'many' of COLDSTART_PREFETCH_STREAMS"):
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
    os.kill(status(runtime)["pid"], signal.SIGKILL)
    found += loading
    for tensor, view in found:
        assert view == weights.data[tensor.file][tensor.offset : tensor.end]
    assert [tensor for tensor, _ in found] == tensors and report.way == "files"
    (fallback,) = report.fallbacks
    assert "the prefetcher has exited" in fallback.reason


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def _regions(pid: int | str = "[0-9]*") -> dict[int, set[str]]:
    """Return the processes that hold a prefetcher's region, by inode; only regions of `pid`."""
    found: dict[int, set[str]] = {}
    for link in Path("/proc").glob(f"{pid}/fd/*"):
        with suppress(OSError):
            if "coldstart-weights" in os.readlink(link):  # noqa: PTH115 - it names no path
                found.setdefault(link.stat().st_ino, set()).add(link.parts[2])
    return found


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("coldstart-weights")


def _children() -> list[str]:
    return (Path("/proc/self/task") / str(os.getpid()) / "children").read_text().split()


@pytest.mark.slow
@pytest.mark.parametrize("cycles", [20, pytest.param(100, marks=pytest.mark.nightly)])
def test_starts_leave_nothing_open(weights: Weights, server: RangeServer, runtime: Path, cycles: int) -> None:
    names = weights.names("b.")[:3]

    def cycle() -> set[int]:
        with client.attach(server.url, weights.plan, names=names, directory=runtime) as attached:
            check_tensors(attached, weights, names)
            held = _regions(status(runtime)["pid"])
        client.request("stop", directory=runtime)
        return set(held)

    cycle()
    children, before = set(_children()), (_mappings(), sorted(runtime.iterdir()))
    # The test's own server has threads and connections that end in their own time.
    open_files, threads, regions = _descriptors(), threading.active_count(), set[int]()
    for _ in range(cycles):
        regions |= cycle()
    wait_until(lambda: threading.active_count() <= threads and _descriptors() <= open_files)
    assert (_mappings(), sorted(runtime.iterdir())) == before
    assert set(_children()) <= children  # ended ones of other tests may have been reaped meanwhile
    assert _descriptors() <= open_files and threading.active_count() <= threads
    assert regions and not regions & _regions().keys()
