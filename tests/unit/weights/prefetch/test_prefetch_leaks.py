"""Nothing is left: memory, descriptors, threads, processes and files are where they were."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.prefetching import Weights, check_tensors, check_whole
from support.range_server import RangeServer

from coldstart.system.ipc.json_lines import Channel
from coldstart.weights.prefetch import client

CYCLES = 100


def _descriptors(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208


def _regions(pid: int | str = "[0-9]*") -> dict[int, set[str]]:
    """Return the processes that hold a prefetcher's region, by inode; only regions of `pid`."""
    found: dict[int, set[str]] = {}
    for link in Path("/proc").glob(f"{pid}/fd/*"):
        with suppress(OSError):
            if "coldstart-weights" in os.readlink(link):  # noqa: PTH115 - it names no path
                found.setdefault(link.stat().st_ino, set()).add(link.parts[2])
    return found


def _status(runtime: Path) -> dict[str, Any]:
    (one,) = client.request("status", directory=runtime)
    return one


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("coldstart-weights")


def _children() -> list[str]:
    return (Path("/proc/self/task") / str(os.getpid()) / "children").read_text().split()


@pytest.mark.slow
def test_a_hundred_starts_and_stops(weights: Weights, server: RangeServer, runtime: Path) -> None:
    names = weights.names("b.")[:3]

    def cycle() -> set[int]:
        with client.attach(server.url, weights.plan, names=names, directory=runtime) as attached:
            check_tensors(attached, weights, names)
            held = _regions(_status(runtime)["pid"])
        client.request("stop", directory=runtime)
        return set(held)

    cycle()
    children, before = set(_children()), (_mappings(), sorted(runtime.iterdir()))
    # The test's own server has threads and connections that end in their own time.
    open_files, threads, regions = _descriptors(), threading.active_count(), set[int]()
    for _ in range(CYCLES):
        regions |= cycle()
    _settled(lambda: threading.active_count() <= threads and _descriptors() <= open_files)
    assert (_mappings(), sorted(runtime.iterdir())) == before
    assert set(_children()) <= children  # ended ones of other tests may have been reaped meanwhile
    assert _descriptors() <= open_files and threading.active_count() <= threads
    assert regions and not regions & _regions().keys()


def test_one_of_two_concurrent_prefetchers_remains(
    weights: Weights, server: RangeServer, runtime: Path
) -> None:
    starts: list[Channel] = []

    def start() -> None:
        starts.append(client.start_early(server.url, weights.plan, directory=runtime))

    together = [threading.Thread(target=start) for _ in range(4)]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join()
    with client.attach(server.url, weights.plan, directory=runtime) as attached:
        check_whole(attached, weights)
        assert server.total() == sum(map(len, weights.data.values()))
    for early in starts:
        early.close()


def _settled(done: Callable[[], bool]) -> None:
    """Give what ends by itself (a server's thread, a closed socket's other end) the time to do so."""
    import time

    deadline = time.monotonic() + 30
    while not done() and time.monotonic() < deadline:
        time.sleep(0.01)
