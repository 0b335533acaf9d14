"""Skip-join MLFQ and the express lane against first come, first served on real vLLM on this CPU.

The physics: with a batch of B and iterations of t seconds an engine makes B/t tokens a second, whoever gets them.
Scheduling moves the waiting from requests that need little to requests that need much; per token, a wait of w
seconds costs w/n for an answer of n tokens, so a tail of long answers in front of short ones is what the mean pays
for. Nothing is gained where nobody waits, or where all need the same; a larger batch, where memory allows it, is the
other way to stop the waiting, which is why `fcfs-max` is here.

Real servers (`coldstart serve`), real tokens; load 1 is the rate that FCFS with the same batch cap was measured to
sustain just before, in every repetition, because the pace of a shared machine drifts. All schedulers serve the same
requests within a repetition, in an order that rotates, and every answer is compared token by token with FCFS. Each
finished run is one line of the log; run it again to go on. With `--together S` they serve at the same time, each engine with
the share S of one core (`live/pace.py`).

    python benchmarks/live_scheduling.py --prepare
    python benchmarks/live_scheduling.py [--regime R] [--workload W] [--load L] [--repetitions N] [--swapping | --express]
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from live import model, summary, workloads
from live.cells import BASELINE, LANE, LANE_ALONE, REGIMES, SWAPPING, Cell, Regime, cells
from live.log import Log
from live.measure import capacity, run
from live.servers import Fleet, Server, bind_client

from coldstart.measure.bench import facts

HERE = Path(__file__).parent
RESULTS = HERE / "results"
KINDS = {regime.name: regime for regime in (*REGIMES.values(), SWAPPING)}


def main(argv: Sequence[str]) -> int:
    """Measure what is missing in the log, write the result, print the table and one line of JSON."""
    options = _options(argv)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # servers must not outlive this
    if options.prepare:
        return prepare()
    log, machine = Log(options.log), facts.machine()  # before this process binds itself to some of the cores
    wanted = list(_wanted(options))
    if not options.summary_only:
        measure(wanted, log, options)
    campaign = "swapping" if options.swapping else "express" if options.express else "regimes"
    name = f"scheduling-live-{campaign}"
    done = [row for cell in wanted if (row := log.find(kind="run", **cell.document()))]
    result = document(name, done, [row for row in log.rows if row["kind"] == "capacity"], argv)
    result["machine"] = machine
    target = options.result or RESULTS / f"{name}.json"
    target.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join([*summary.table(result["cells"]), "", *summary.swap_table(result["cells"])]))
    print(json.dumps({k: v for k, v in result.items() if k not in ("cells", "runs")}))
    return 0 if len(done) == len(wanted) else 1


def prepare() -> int:
    """Make the bundles anew, with iteration times as they are on this machine now."""
    bind_client()  # as `measure` does: a bundle is for so many cores
    with tempfile.TemporaryDirectory(prefix="live-") as work:
        for bundle in {regime.bundle(str(model.build())) for regime in KINDS.values()}:
            Fleet(Path(work)).materialize(bundle, force=True)
            print(f"made {bundle}", file=sys.stderr)
    return 0


def measure(wanted: Iterable[Cell], log: Log, options: argparse.Namespace) -> None:
    """Run what the log lacks, until `minutes` have passed; `together`, all schedulers of a cell at the same time."""
    minutes, share = options.minutes, options.together
    missing = [cell for cell in wanted if log.find(kind="run", **cell.document()) is None]
    turns = [list(cells) for _, cells in groupby(missing, key=lambda cell: replace(cell, scheduler=""))]
    if share is None:
        turns = [[cell] for cell in missing]
    bind_client()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="live-") as work:
        fleet = Fleet(Path(work), share)
        try:
            for number, turn in enumerate(turns):
                if share is not None and number and turn[0].repetition != turns[number - 1][0].repetition:
                    fleet.end_all()
                if minutes is not None and time.monotonic() - began > 60 * minutes:
                    print(f"stopped: {len(turns) - number} of {len(turns)} are left", file=sys.stderr)
                    return
                _measure(turn, fleet, log, options.length)
                spent = time.monotonic() - began
                print(f"{number + 1}/{len(turns)} {spent:.0f} s {turn[0]}", file=sys.stderr)
        finally:
            fleet.close()


def _measure(turn: Sequence[Cell], fleet: Fleet, log: Log, length: float) -> None:
    cell = turn[0]
    regime = KINDS[cell.regime]
    servers = {one.scheduler: _server(regime, one.scheduler, fleet) for one in turn}
    servers = {BASELINE: _server(regime, BASELINE, fleet)} | servers
    sustained = _capacity(regime, cell, list(servers.values()) if fleet.share else [servers[BASELINE]], log)
    # Side by side all goes slower, so that as many requests take longer.
    length *= regime.share / (fleet.share or 1.0)
    load_1 = sustained["requests_per_s"]
    count = workloads.count_of(cell.workload, cell.load, load_1, length)
    rows = workloads.arriving(cell.workload, cell.load, load_1, cell.seed, count)
    found = run([servers[one.scheduler] for one in turn], rows, cell.seed)
    for one, result in zip(turn, found, strict=True):
        log.add({"kind": "run", **one.document(), **result, "at": facts.today()})


def _capacity(regime: Regime, cell: Cell, servers: Sequence[Server], log: Log) -> dict[str, float]:
    """Of FCFS with the batch cap, the first of the servers, measured before the first run of each repetition."""
    place = {"regime": regime.name, "workload": cell.workload, "repetition": cell.repetition}
    known = log.find(kind="capacity", **place)
    if known is None:
        # The first requests of a server's life are slower.
        if fresh := [server for server in servers if not server.warm]:
            capacity(fresh, cell.workload, regime.batch, seed=2)
        known = {"kind": "capacity", **place, **capacity(servers, cell.workload, regime.batch)}
        log.add(known)
    return known


def _server(regime: Regime, scheduler: str, fleet: Fleet) -> Any:
    return fleet.server(
        f"{regime.name}-{scheduler}", regime.bundle(str(model.build())), regime.schedulers[scheduler]
    )


def _wanted(options: argparse.Namespace) -> Iterable[Cell]:
    usual, kinds = ["batch-bound", "kv-bound"] if options.express else list(REGIMES), list(workloads.USUAL)
    chosen = [SWAPPING] if options.swapping else [REGIMES[name] for name in options.regime or usual]
    if options.swapping:
        kinds = ["skewed"]
    elif options.express:
        kinds = list(workloads.WORKLOADS)
    names = {name for regime in chosen for name in regime.schedulers}
    only = options.scheduler or (LANE if options.express else names - LANE_ALONE)
    chosen = [replace(r, schedulers={n: o for n, o in r.schedulers.items() if n in only}) for r in chosen]
    loads = options.load or (["1.1"] if options.swapping else workloads.LOADS)
    asked = {
        kind: [load for load in workloads.WORKLOADS[kind] if load in loads]
        for kind in options.workload or kinds
    }
    return cells(chosen, asked, options.repetitions)


def document(name: str, rows: list[Any], capacities: list[Any], argv: Sequence[str]) -> dict[str, Any]:
    """The result file."""
    found = summary.summarize(rows)
    return {
        "benchmark": name,
        "date": facts.today(),
        "versions": facts.versions(),
        "command": ["python", "benchmarks/live_scheduling.py", *facts.without_paths(argv)],
        "capacity": capacities,
        "options": {regime.name: dict(regime.schedulers) for regime in KINDS.values()},
        "verdicts": summary.verdicts(found),
        "cells": found,
        "runs": [_published(row) for row in rows],
    }


def _published(row: dict[str, Any]) -> dict[str, Any]:
    """A run without what every single request experienced."""
    return {k: v for k, v in row.items() if k not in ("kind", "requests")} | {"count": len(row["requests"])}


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--regime", action="append", choices=list(REGIMES))
    parser.add_argument("--workload", action="append", choices=list(workloads.WORKLOADS))
    parser.add_argument("--load", action="append", choices=workloads.LOADS)
    parser.add_argument("--scheduler", action="append", help="only these, by name")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument(
        "--together",
        type=float,
        metavar="SHARE",
        help="all schedulers at once, each with that share of a core",
    )
    parser.add_argument(
        "--length", type=float, default=1.0, metavar="FACTOR", help="runs so many times as long"
    )
    parser.add_argument(
        "--swapping", action="store_true", help="the memory-starved pool and its three strategies"
    )
    parser.add_argument("--express", action="store_true", help="the express lane's own campaign")
    parser.add_argument("--prepare", action="store_true", help="make the bundles anew, measure nothing")
    parser.add_argument("--minutes", type=float, help="start no run after this long")
    parser.add_argument("--log", type=Path, default=Path("build/live-scheduling.jsonl"))
    parser.add_argument("--result", type=Path, help="where the result goes; default: results/")
    parser.add_argument("--summary-only", action="store_true", help="measure nothing")
    options = parser.parse_args(argv)
    options.log.parent.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
