"""Rates of this machine's hardware and kernel in bytes per second, the ceilings of the weight benchmarks.

disk      sequential O_DIRECT reads of the checkpoint, 16 MiB each, one stream and four.
memcpy    copy by one core between buffers that were touched before.
touch     first write to fresh anonymous memory, a byte per page: 4 KiB pages; huge pages; huge pages after the
          hypervisor had time to reclaim them (`benchmarks.weights.memory`).
read      page cache into a buffer that was touched before (a copy by the kernel).
wire      HTTP over loopback, no limit, into one reused buffer: one stream and four.
"""

from __future__ import annotations

import http.client
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.weights import checkpoint, file_server
from benchmarks.weights.memory import RETURNED_S, touch_rate
from coldstart.models.resolution import weight_files

BLOCK = 16 << 20
SAMPLE = 512 << 20
Range = tuple[Path, int, int]


def measure(directory: Path) -> dict[str, float]:
    """Every limit once, in bytes per second. Leaves the page cache warm."""
    checkpoint.evict(directory)
    found = {f"disk {n}": disk(directory, n) for n in (1, 4)}
    checkpoint.warm(directory)
    found |= {f"read {n}": _streams(directory, n, _cached) for n in (1, 2)}
    found["memcpy"] = memcpy()
    found |= touches()
    with file_server.running(directory) as server:
        found |= {f"wire {n}": wire(server.url, directory, n) for n in (1, 4)}
    return found


def disk(directory: Path, streams: int) -> float:
    """Bytes per second that `streams` threads read of the checkpoint past the page cache."""
    return _streams(directory, streams, _direct)


def memcpy() -> float:
    """Bytes per second that one core copies."""
    source, target = np.ones(SAMPLE // 2, np.uint8), np.zeros(SAMPLE // 2, np.uint8)
    return SAMPLE // 2 / min(_timed(lambda: np.copyto(target, source)) for _ in range(5))


def touches() -> dict[str, float]:
    """Bytes per second of first touches by kind of page; the best of three, so the memory is backed, but for the last."""
    kinds = {"touch 4k": mmap.MADV_NOHUGEPAGE, "touch huge": mmap.MADV_HUGEPAGE}
    found = {name: max(touch_rate(advice, SAMPLE) for _ in range(3)) for name, advice in kinds.items()}
    time.sleep(RETURNED_S)
    return found | {"touch huge, returned": touch_rate(mmap.MADV_HUGEPAGE, SAMPLE)}


def wire(url: str, directory: Path, streams: int) -> float:
    """Bytes per second that `streams` HTTP connections bring into reused buffers."""
    host = url.removeprefix("http://")

    def fetch(share: list[Range]) -> None:
        connection, buffer = http.client.HTTPConnection(host), memoryview(bytearray(BLOCK))
        for file, first, count in share:
            connection.request(
                "GET", f"/{file.name}", headers={"Range": f"bytes={first}-{first + count - 1}"}
            )
            reply, got = connection.getresponse(), 0
            while got < count:
                got += reply.readinto(buffer[got:count])
            reply.read()
        connection.close()

    return _streams(directory, streams, fetch)


def _streams(directory: Path, count: int, work: Callable[[list[Range]], None]) -> float:
    ranges = [
        (file, first, min(BLOCK, file.stat().st_size - first))
        for file in weight_files(directory)
        for first in range(0, file.stat().st_size, BLOCK)
    ]
    with ThreadPoolExecutor(count) as pool:
        spent_s = _timed(lambda: list(pool.map(work, [ranges[i::count] for i in range(count)])))
    return checkpoint.size(directory) / spent_s


def _direct(share: list[Range]) -> None:
    _read(share, os.O_DIRECT)


def _cached(share: list[Range]) -> None:
    _read(share, 0)


def _read(share: list[Range], flags: int) -> None:
    buffer = mmap.mmap(-1, BLOCK, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for file, first, _ in share:
        descriptor = os.open(file, os.O_RDONLY | flags)
        os.preadv(descriptor, [buffer], first)
        os.close(descriptor)


def _timed(work: Callable[[], object]) -> float:
    began_s = time.monotonic()
    work()
    return time.monotonic() - began_s
