"""The live host: cost of the gateway, and requests to a stopped model.

Real vLLM on the CPU with a tiny model, whose bundle and template are created first. Each part replaces its own member of the
result.

Run: python -m benchmarks host/live --part overhead|cold|all [--seconds N]
Time: 5 to 15 minutes for each part
Result: host-live-cpu.json
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import RESULTS, command_line, parser
from benchmarks.host import cold, overhead
from benchmarks.host.servers import build_bundle, start_template

RESULT = RESULTS / "host-live-cpu.json"


PREPARED: dict[str, Callable[[], None]] = {
    "overhead": build_bundle,
    "cold": start_template,
}


def main() -> None:
    """Measure one part after the other."""
    arguments = parser(__doc__)
    arguments.add_argument("--part", default="all", choices=(*PREPARED, "all"))
    arguments.add_argument("--seconds", type=float, default=480.0, help="about how long overhead takes")
    arguments.add_argument("--out", type=Path, default=RESULT, help="result file")
    arguments.add_argument("--rounds", type=int, default=15, help="of overhead, at most")
    arguments.add_argument("--requests", type=int, default=200, help="of overhead and cold")
    given = arguments.parse_args()
    for name, prepare in PREPARED.items():
        if given.part not in (name, "all"):
            continue
        prepare()
        load, began = os.getloadavg()[0], time.time()
        if name == "cold":
            found = asyncio.run(cold.cold(given.requests))
        else:
            found = asyncio.run(overhead.overhead(given.rounds, given.requests, given.seconds))
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
