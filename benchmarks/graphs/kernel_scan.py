"""Kernels in CUDA libraries that a bundle can contain or refer to, and the reasons for the others.

Scans every cubin in wheels or libraries; loads none and needs no GPU. A kernel is refused if its binary has variables that
launches share (`state`) or if it is a collective. `unreadable` are cubins that the ELF reader refuses; LZ4 cubins are not
seen.

Run: python -m benchmarks graphs/kernel_scan WHEEL_OR_LIBRARY... [--out FILE]
Time: minutes, by the size of the libraries
Result: kernel-scan.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coldstart.graphs.capture import COLLECTIVES
from coldstart.graphs.elf import Cubin, read_cubin
from coldstart.graphs.errors import AlteredTableError
from coldstart.graphs.fatbin import library_entries, unpack

ARCHITECTURES = (80, 90)


@contextmanager
def libraries(path: Path) -> Iterator[list[Path]]:
    """Yield the shared libraries of a wheel, or the library itself."""
    if path.suffix != ".whl":
        yield [path]
        return
    with tempfile.TemporaryDirectory(prefix="scan-") as place, zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if ".so" in Path(name).name]
        yield [Path(wheel.extract(name, place)) for name in names]


def scan(library: Path) -> dict[str, Any]:
    """Return the counts of one library, for all and for the selected architectures."""
    start, counts, states = time.monotonic(), Counter[str](), set[str]()
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            for entry in library_entries(data):
                counts["cubins, all architectures"] += 1
                if entry.architecture in ARCHITECTURES:
                    _count(data[entry.offset : entry.offset + entry.size], counts, states)
        except AlteredTableError:
            return {}
    found = {"library": library.name, **counts, "variables": sorted(states)[:20]}
    return found | {"seconds": round(time.monotonic() - start, 2)} if counts else {}


def _count(packed: bytes, counts: Counter[str], states: set[str]) -> None:
    counts["cubins"] += 1
    try:
        cubin = read_cubin(unpack(packed))
    except AlteredTableError:
        counts["unreadable"] += 1
        return
    counts["kernels"] += len(cubin.kernels)
    counts["cubins with state"] += bool(cubin.mutable_globals)
    counts["kernels without parameters"] += sum(not layout for layout in cubin.kernels.values())
    states |= set(cubin.mutable_globals)
    for name in cubin.kernels:
        if reason := refusal(cubin, name):
            counts[f"refused: {reason}"] += 1


def refusal(cubin: Cubin, name: str) -> str | None:
    """Return the reason why a kernel would not be restored, or None."""
    if any(mark in name for mark in COLLECTIVES):
        return "collective"
    if cubin.mutable_globals:
        return "state"
    return None


def totals(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums and the share of refused kernels without collectives."""
    names = {name for row in found for name, value in row.items() if isinstance(value, int)}
    sums: dict[str, Any] = {name: sum(row.get(name, 0) for row in found) for name in sorted(names)}
    kernels = sums.get("kernels", 0) - sums.get("refused: collective", 0)
    return sums | {"refused share": round(sums.get("refused: state", 0) / kernels, 6) if kernels else None}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sources = []
    for path in options.paths:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        with libraries(path) as held, ProcessPoolExecutor(options.jobs) as pool:
            found = [row for row in pool.map(scan, held) if row]
        sources.append({"file": path.name, "sha256": digest, "totals": totals(found), "libraries": found})
        print(path.name, sources[-1]["totals"], file=sys.stderr, flush=True)
    rows = [row for source in sources for row in source["libraries"]]
    report = {
        "architectures": ARCHITECTURES, "totals": totals(rows), "sources": sources,
        "command": " ".join(["python -m benchmarks graphs/kernel_scan", *(p.name for p in options.paths)]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }  # fmt: skip
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["totals"]))


if __name__ == "__main__":
    main()
