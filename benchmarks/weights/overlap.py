"""Time until all weights are in the engine when the fetch overlaps the imports, over the rate of the network.

A start imports torch and vLLM and fetches the weights. One after the other costs the sum, side by side at least the longer:

    max(import, fetch) <= coldstart <= sequential, and sequential >= import + fetch

The rates follow from the imports of each round: `matched` fetches in the time of the imports, then half and double of that
rate, and no limit. Ways, from the launch of the first process to the last weight in its parameter:

    imports      a process that imports the modules for loading.
    sequential   four streams to the disk, then a process that imports and loads the files like vLLM.
    coldstart    a process that requests the prefetcher, imports, and loads from its memory as the bytes arrive.

Equation 5 (`coldstart.launch.ttft`) predicts `coldstart` from the sequential starts. Client and server share two cores.
The ways rotate by round; figures are medians with their range.

Run: python -m benchmarks weights/overlap [--runs 5] [--rates matched half double unlimited]
Time: about 15 minutes
Result: weights.json
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.weights import checkpoint, file_server, node, report
from coldstart.models.resolution import weight_files

# Multiples of the rate at which fetching takes as long as importing; None is unlimited.
RATES: dict[str, float | None] = {"matched": 1, "half": 0.5, "double": 2, "unlimited": None}
STREAMS, BLOCK = 4, 16 << 20


@dataclass(frozen=True)
class Bench:
    """The checkpoint, its server, and a model directory without weights."""

    checkpoint: Path
    server: file_server.Remote
    bare: Path
    plan: Path

    def imports(self) -> dict[str, Any]:
        """Run a process that only imports."""
        began_s = time.monotonic()
        return {"seconds": _process(["imports"])["imported_at_s"] - began_s}

    def sequential(self, digest: bool) -> dict[str, Any]:
        """Download, then import, then load."""
        target = checkpoint.home() / "downloaded"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.bare, target)
        began_s = time.monotonic()
        _download(self.server.url, self.checkpoint, target)
        fetched_s = time.monotonic()
        try:
            found = _process(["safetensors", str(target), *["--digest"] * digest])
        finally:
            shutil.rmtree(target)
        return _timed(began_s, found) | {"fetch_s": fetched_s - began_s}

    def coldstart(self, digest: bool) -> dict[str, Any]:
        """Run prefetcher and process at the same time."""
        environment = node.streaming(self.server.url, self.plan)
        began_s = time.monotonic()
        try:
            found = _process(["coldstart", str(self.bare), *["--digest"] * digest], environment)
        finally:
            node.stop_prefetcher(node.runtime())
        return _timed(began_s, found)


def main() -> None:
    """Measure, print the table and the result as one line, and store it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rates", nargs="+", default=list(RATES), choices=list(RATES))
    wanted = parser.parse_args()
    directory = checkpoint.built()
    checkpoint.warm(directory)
    node.stop_prefetcher(node.runtime())
    with file_server.running(directory) as server:
        bench = Bench(directory, server, node.bare(directory), node.plan(directory))
        bench.imports()  # compiles and caches what a first start does
        size = checkpoint.size(directory)
        samples = [
            sample for number in range(wanted.runs) for sample in _round(bench, wanted.rates, size, number)
        ]
    report.finish("weights", report.overlap(samples, wanted.rates, size))


def _round(bench: Bench, rates: list[str], size: int, number: int) -> list[dict[str, Any]]:
    found = [{"way": "imports", "round": number, **bench.imports()}]
    matched = size / found[0]["seconds"]
    steps = [(way, rate) for rate in rates for way in ("sequential", "coldstart")]
    shift = number % len(steps)
    for way, rate in steps[shift:] + steps[:shift]:
        limit = (share := RATES[rate]) and share * matched
        bench.server.set_rate(limit)
        sample = getattr(bench, way)(digest=number == 0)
        sent = bench.server.sent_bytes()
        place = {"way": way, "rate": rate, "bytes_s": limit, "round": number, "sent_bytes": sent}
        found.append(place | sample)
        print(f"round {number}: {way} {rate}: {sample['seconds']:.2f} s", file=sys.stderr, flush=True)
    return found


def _timed(began_s: float, found: Mapping[str, Any]) -> dict[str, Any]:
    parts = {
        name: found[name]
        for name in ("load_s", "construct_s", "usable_s", "cpu_s", "digest")
        if name in found
    }
    at = {"imports_s": found["imported_at_s"] - began_s, "seconds": found["loaded_at_s"] - began_s}
    return at | parts


def _process(arguments: list[str], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.weights.process", *arguments]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**node.environment(), **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _download(url: str, directory: Path, target: Path) -> None:
    """Download four streams of 16 MiB ranges into files."""
    ranges = [
        (file.name, first, min(BLOCK, file.stat().st_size - first))
        for file in weight_files(directory)
        for first in range(0, file.stat().st_size, BLOCK)
    ]
    with ThreadPoolExecutor(STREAMS) as pool:
        shares = [ranges[number::STREAMS] for number in range(STREAMS)]
        list(pool.map(lambda share: _fetch(url, share, target), shares))


def _fetch(url: str, share: list[tuple[str, int, int]], target: Path) -> None:
    connection, buffer = (
        http.client.HTTPConnection(url.removeprefix("http://")),
        memoryview(bytearray(1 << 20)),
    )
    for name, first, count in share:
        connection.request("GET", f"/{name}", headers={"Range": f"bytes={first}-{first + count - 1}"})
        reply = connection.getresponse()
        descriptor = os.open(target / name, os.O_WRONLY | os.O_CREAT, 0o600)
        done = 0
        while got := reply.readinto(buffer):
            os.pwrite(descriptor, buffer[:got], first + done)
            done += got
        os.close(descriptor)
        if done < count:
            raise RuntimeError(f"{name}: the connection ended after {done} of {count} bytes")
    connection.close()


if __name__ == "__main__":
    main()
