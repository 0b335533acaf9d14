"""The live host: cost of the gateway, requests to stopped models, scale to zero and back, faults.

Real vLLM on the CPU with tiny models. Bundles and engine templates are created first; `--prepare` does only that. Each part
replaces its own member of the result.

Run: python -m benchmarks host/live --part overhead|cold|cycles|faults|all [--seconds N]
Time: 5 to 15 minutes for each part
Result: host-live-cpu.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, command_line
from benchmarks.host import cold, cycles, faults, overhead
from benchmarks.host.servers import MODELS, bundles, templates

RESULT = RESULTS / "host-live-cpu.json"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", default="all", choices=(*PREPARED, "all"))
    parser.add_argument(
        "--prepare", action="store_true", help="make what the part needs, and measure nothing"
    )
    parser.add_argument(
        "--seconds", type=float, default=480.0, help="about how long overhead and cycles take"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULT, help="result file; use another one for a trial run"
    )
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15, help="of overhead, at most")
    parser.add_argument("--requests", type=int, default=200, help="of overhead and cold")
    return parser


PREPARED: dict[str, Callable[[], None]] = {
    "overhead": lambda: bundles(MODELS[:1]),
    "cold": lambda: templates(MODELS[:1]),
    "cycles": lambda: templates(MODELS),
    "faults": lambda: templates(MODELS),
}


def _measured(name: str, given: argparse.Namespace) -> dict[str, Any]:
    match name:
        case "overhead":
            return asyncio.run(overhead.overhead(given.rounds, given.requests, given.seconds))
        case "cold":
            return asyncio.run(cold.cold(given.requests))
        case "cycles":
            return asyncio.run(cycles.cycles(given.cycles, given.seconds))
        case _:
            return asyncio.run(faults.faults())


def main() -> None:
    """One part after the other."""
    given = _parser().parse_args()
    for name, prepare in PREPARED.items():
        if given.part not in (name, "all"):
            continue
        prepare()
        if given.prepare:
            continue
        load, began = os.getloadavg()[0], time.time()
        found = _measured(name, given)
        known = json.loads(given.out.read_text()) if given.out.exists() else {}
        about = {
            "command": " ".join(command_line()),
            "seconds": time.time() - began,
            "load_before": load,
            "load_after": os.getloadavg()[0],
            "cores": os.cpu_count(),
        }
        known[name] = {"about": about, **found}
        given.out.write_text(json.dumps(known, indent=1) + "\n")
        print(json.dumps({name: known[name]}, indent=1))


if __name__ == "__main__":
    main()
