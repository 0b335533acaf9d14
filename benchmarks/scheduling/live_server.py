"""Skip-join MLFQ against first come, first served on real vLLM on this CPU.

A batch of B with iterations of t seconds produces B/t tokens a second for any order. Scheduling moves the waiting from requests
that need little to requests that need much; a wait of w seconds costs w/n per token for an answer of n tokens. Nothing is
gained if no request waits or all need the same. A larger batch also removes the waiting, which is why `fcfs-max` is here.

Load 1 is the rate that FCFS with the same batch sustained just before, in every repetition. All schedulers serve the same
requests within a repetition, in an order that rotates, and every answer is compared with that of FCFS. Each finished run is
one line of the log; a second call continues.

Run: python -m benchmarks scheduling/live_server [--regime R] [--workload W] [--load L] [--repetitions N]
Time: about 2 hours
Result: scheduling-live-regimes.json
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, command_line, parser
from benchmarks.scheduling.live import model, summary, workloads
from benchmarks.scheduling.live.cells import REGIMES, Cell, Regime, cells
from benchmarks.scheduling.live.log import Log
from benchmarks.scheduling.live.measure import capacity, run
from benchmarks.scheduling.live.names import BASELINE
from benchmarks.scheduling.live.servers import Fleet, Server, bind_client
from coldstart.bench import facts


def main(argv: Sequence[str]) -> int:
    """Measure what is missing in the log, write the result, print it as one line of JSON."""
    options = _options(argv)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # servers must not outlive this
    log, machine = Log(options.log), facts.machine()  # before this process binds itself to some of the cores
    wanted = list(_wanted(options))
    measure(wanted, log, options)
    done = [row for cell in wanted if (row := log.find(kind="run", **cell.document()))]
    result = document(done, [row for row in log.rows if row["kind"] == "capacity"]) | {"machine": machine}
    options.result.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k not in ("cells", "runs")}))
    return 0 if len(done) == len(wanted) else 1


def measure(wanted: Iterable[Cell], log: Log, options: argparse.Namespace) -> None:
    """Run the cells that the log lacks, for at most `minutes`."""
    missing = [cell for cell in wanted if log.find(kind="run", **cell.document()) is None]
    bind_client()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="live-") as work, ExitStack() as started:
        fleet = Fleet(Path(work), started)
        for number, cell in enumerate(missing):
            if options.minutes is not None and time.monotonic() - began > 60 * options.minutes:
                print(f"stopped: {len(missing) - number} of {len(missing)} are left", file=sys.stderr)
                return
            _measure(cell, fleet, log)
            spent = time.monotonic() - began
            print(f"{number + 1}/{len(missing)} {spent:.0f} s {cell}", file=sys.stderr)


def _measure(cell: Cell, fleet: Fleet, log: Log) -> None:
    regime = REGIMES[cell.regime]
    load_1 = _capacity(regime, cell, _server(regime, BASELINE, fleet), log)["requests_per_s"]
    count = workloads.request_count(cell.workload, cell.load, load_1, regime.share)
    rows = workloads.arriving(cell.workload, cell.load, load_1, cell.seed, count)
    found = run(_server(regime, cell.scheduler, fleet), rows, cell.seed)
    log.add({"kind": "run", **cell.document(), **found, "at": facts.today()})


def _capacity(regime: Regime, cell: Cell, server: Server, log: Log) -> dict[str, float]:
    """Return the rate of FCFS with the batch cap, measured before the first run of each repetition."""
    place = {"regime": regime.name, "workload": cell.workload, "repetition": cell.repetition}
    known = log.find(kind="capacity", **place)
    if known is None:
        if not server.warm:
            capacity(server, cell.workload, regime.batch, seed=2)
        known = {"kind": "capacity", **place, **capacity(server, cell.workload, regime.batch)}
        log.add(known)
    return known


def _server(regime: Regime, scheduler: str, fleet: Fleet) -> Any:
    return fleet.server(
        f"{regime.name}-{scheduler}", regime.bundle(str(model.build())), regime.schedulers[scheduler]
    )


def _wanted(options: argparse.Namespace) -> Iterable[Cell]:
    chosen = [REGIMES[name] for name in options.regime or REGIMES]
    return cells(
        chosen, options.workload or ["skewed", "azure"], options.load or workloads.LOADS, options.repetitions
    )


def document(rows: list[Any], capacities: list[Any]) -> dict[str, Any]:
    """Return the content of the result file."""
    return {
        "date": facts.today(),
        "versions": facts.versions(),
        "command": command_line(),
        "capacity": capacities,
        "options": {regime.name: dict(regime.schedulers) for regime in REGIMES.values()},
        "cells": summary.summarize(rows),
        "runs": [_published(row) for row in rows],
    }


def _published(row: dict[str, Any]) -> dict[str, Any]:
    """Return a run without the records of single requests."""
    return {k: v for k, v in row.items() if k not in ("kind", "requests")} | {"count": len(row["requests"])}


def _options(argv: Sequence[str]) -> argparse.Namespace:
    arguments = parser(__doc__)
    arguments.add_argument("--regime", action="append", choices=list(REGIMES))
    arguments.add_argument("--workload", action="append", choices=workloads.WORKLOADS)
    arguments.add_argument("--load", action="append", choices=workloads.LOADS)
    arguments.add_argument("--repetitions", type=int, default=5)
    arguments.add_argument("--minutes", type=float, help="start no run after this long")
    arguments.add_argument("--log", type=Path, default=Path("build/live-scheduling.jsonl"))
    arguments.add_argument("--result", type=Path, default=RESULTS / "scheduling-live-regimes.json")
    options = arguments.parse_args(argv)
    options.log.parent.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
