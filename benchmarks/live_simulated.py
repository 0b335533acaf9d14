"""The live campaign of the express lane, simulated: the same requests, and what the simulator foretells of each ratio.

Read from the campaign's published result: which requests arrived when, in every run of every scheduler. They are served again
on the simulated engine with the iteration times of the servers' bundle. Load 1 is what the simulated FCFS sustains, measured
as it was live, so that both have the same load; lengths are learned from the same requests before a run. The quotient is the
live ratio over the simulated one, both medians over the repetitions.

    python benchmarks/live_simulated.py [--part PART]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from live import measure, model, workloads
from live.cells import BASELINE, BLOCK_BYTES, HOST_MEMORY, REGIMES, Cell, Regime
from live.summary import spread

from coldstart.key import inspection
from coldstart.measure.bench import facts
from coldstart.scheduling import IterationProfile, SchedulerSettings
from coldstart.scheduling.simulate import SimJob, SimSettings, simulate
from coldstart.traces import TraceRequest

RESULTS = Path(__file__).parent / "results"
LIVE = "scheduling-live-express"
BLOCK, MOST_TOKENS, METRIC, NEAR = 32, 2048, "per_token_s.mean", 0.3
Row = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", help=f"of the campaign, with a result file of its own: {LIVE}-PART")
    part = f"-{given}" if (given := parser.parse_args(argv).part) else ""
    live = json.loads((RESULTS / f"{LIVE}{part}.json").read_text())
    found = list(cells(live))
    name = f"scheduling-live-simulated{part}"
    result = {
        "benchmark": name,
        "kind": "simulated, beside what was measured",
        "date": facts.today(),
        "versions": facts.versions(),
        "command": ["python", "benchmarks/live_simulated.py", *facts.without_paths(argv)],
        "near": NEAR,
        "cells": found,
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    far = [one for one in found if abs(one["quotient"] - 1) > NEAR]
    print(json.dumps({"compared": len(found), "farther_than_30_percent": len(far)}))
    return 0


def cells(live: Row) -> Iterator[Row]:
    """One for each scheduler of each live cell and its baseline."""
    sustained = {(c["regime"], c["workload"], c["repetition"]): c["requests_per_s"] for c in live["capacity"]}
    for one in live["cells"]:
        place = {name: one[name] for name in ("regime", "workload", "load")}
        runs = [run for run in live["runs"] if place.items() <= run.items()]
        times = {
            (run["scheduler"], run["repetition"]): _simulated(
                run, sustained[run["regime"], run["workload"], run["repetition"]]
            )
            for run in runs
        }
        for base, others in one["against"].items():
            for name, measured in others.items():
                ratios = [
                    times[base, n] / times[name, n] for who, n in times if who == name and (base, n) in times
                ]
                ours, theirs = spread(ratios), measured[METRIC]
                yield {
                    **place,
                    "scheduler": name,
                    "against": base,
                    "live": theirs,
                    "simulated": ours,
                    "quotient": theirs["median"] / ours["median"],
                }


def _simulated(run: Row, sustained: float) -> float:
    """The mean time per token of a run, simulated."""
    regime = REGIMES[run["regime"]]
    cell = Cell(*(run[name] for name in Cell.__slots__))
    rows = workloads.arriving(cell.workload, cell.load, sustained, cell.seed, run["count"])
    pace = sustained / _sustained(regime.name, cell.workload)
    learned = _at_once(regime, cell.workload)
    jobs = _served(regime, cell.scheduler, learned)
    begins = max(job.finished_s or 0.0 for job in jobs) + 1.0
    later = [replace(row, arrival_s=begins + pace * row.arrival_s) for row in rows]
    served = [
        job for job in _served(regime, cell.scheduler, [*learned, *later]) if job.job.arrival_s >= begins
    ]
    return fmean(((job.finished_s or 0.0) - job.job.arrival_s) / job.output for job in served)


def _at_once(regime: Regime, workload: str) -> list[TraceRequest]:
    """What live servers serve before a run."""
    return measure.at_once(workload, regime.batch)


@cache
def _sustained(regime: str, workload: str) -> float:
    """Requests per second of the simulated FCFS with its batch full, as measure.capacity has it of a server."""
    here = REGIMES[regime]
    jobs = _served(here, BASELINE, _at_once(here, workload))
    admitted = max(job.first_token_s or 0.0 for job in jobs)
    tokens = sum(_done_by(job, admitted) for job in jobs)
    return tokens / fmean(job.output for job in jobs) / admitted


def _done_by(job: SimJob, at_s: float) -> float:
    first, last = job.first_token_s or 0.0, job.finished_s or 0.0
    return job.output if at_s >= last else 1 + (job.output - 1) * (at_s - first) / (last - first)


def _served(regime: Regime, scheduler: str, rows: Sequence[TraceRequest]) -> Sequence[SimJob]:
    return simulate(
        rows, _profile(regime.name), _settings(regime.schedulers[scheduler]), _machine(regime)
    ).jobs


def _settings(options: Sequence[str]) -> SchedulerSettings:
    """What `coldstart serve` makes of its options."""
    said: Mapping[str, str] = dict(zip(options[::2], options[1::2], strict=True))
    strategy = said.get("--kv-strategy")
    if said["--scheduler"] == "fcfs" and HOST_MEMORY[0] in said:
        strategy = "proactive"
    batch = int(said["--batch"]) if "--batch" in said else None
    return SchedulerSettings(said["--scheduler"], batch, strategy=strategy)


def _machine(regime: Regime) -> SimSettings:
    return SimSettings(
        token_budget=MOST_TOKENS,
        block_tokens=BLOCK,
        device_blocks=int(regime.pool[-1]) // BLOCK_BYTES - 1,
        host_blocks=int(HOST_MEMORY[1]) // BLOCK_BYTES,
        block_bytes=BLOCK_BYTES,
        link_bytes_s=4e9,
    )


@cache
def _profile(regime: str) -> IterationProfile:
    """The one in the bundle that the servers started from. Raises SystemExit without one."""
    asked = REGIMES[regime].bundle(str(model.build()))
    found = inspection.look_up(asked.model, asked.vllm_args).bundle
    if found is None:
        raise SystemExit(
            "the servers' bundle is not in the store: python benchmarks/live_scheduling.py --prepare"
        )
    return IterationProfile.from_json(found.json("iterations"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
