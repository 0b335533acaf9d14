"""The express lane against first come, first served, simulated: workloads, loads, memory regimes, seeds.

Both have the largest batch. Baselines: vLLM's own scheduler as it is (what is evicted is computed again, as by ours), the same
with KV kept on the host, a control (as it is, every request up to one iteration later), and, on the first seed, ours
with KV on the host and, at load 1.1, skip-join MLFQ and shortest remaining time, which knows the lengths. A ratio
above 1 is faster than the baseline. The seeds are run one after another, the cells of each in an order that is drawn, and
end with the budget: a result says how many seeds each cell has, and what is there is a fair sample.

    OMP_NUM_THREADS=1 python benchmarks/express_grid.py --traces FOLDER [--seeds N] [--minutes N] [--price P]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import express_workloads as workloads
from benchmarks.common import finish, per_token_each
from coldstart.measure.bench import facts
from coldstart.scheduling import SchedulerSettings
from coldstart.scheduling.simulate import Outcome, SimJob, simulate
from coldstart.traces import TraceRequest

PROFILE = workloads.MODEL.profile()
OURS, STOCK, HOST, CONTROL = "express", "fcfs", "fcfs, host KV", "fcfs, control"
HINTED, KEPT = "express, hint", "express, host KV"
ORACLES = {
    "skip-join-mlfq": SchedulerSettings("skip-join-mlfq", alpha_s=3.0),
    "srpt": SchedulerSettings("srpt"),
}
BARRED = ("mean", "p95", "ttft", "longest")
METRICS = (*BARRED, "throughput")
WANTED, LEAST, SHARE, THROUGHPUT, WORST = 0.97, 0.93, 0.98, 0.98, 2.0
HINT, HINT_LONGEST = 4.0, 0.98


def measured(outcome: Outcome) -> dict[str, float]:
    """Mean and p95 time per token, mean TTFT, mean latency of the longest tenth, seconds per token of the whole run."""
    each, jobs = sorted(per_token_each(outcome)), outcome.jobs
    return {
        "mean": fmean(each),
        "p95": each[int(0.95 * len(each))],
        "ttft": fmean((job.first_token_s or 0.0) - job.job.arrival_s for job in jobs),
        "longest": fmean(latency(job) for job in longest(jobs)),
        "throughput": outcome.finished_s / sum(job.output for job in jobs),
    }


def latency(job: SimJob) -> float:
    return (job.finished_s or 0.0) - job.job.arrival_s


def longest(jobs: Sequence[SimJob]) -> list[SimJob]:
    return sorted(jobs, key=lambda job: -job.output)[: len(jobs) // 10]


def over(base: Outcome, ours: Outcome) -> dict[str, float]:
    """Ratios, above 1 where ours is faster; `worst`: how many times slower one of the longest tenth is."""
    theirs, mine = measured(base), measured(ours)
    found = {name: theirs[name] / mine[name] for name in METRICS}
    slower = (latency(a) / max(1e-9, latency(b)) for a, b in zip(ours.jobs, base.jobs, strict=True))
    tenth = {job.job.id for job in longest(base.jobs)}
    found["worst"] = max(r for r, job in zip(slower, base.jobs, strict=True) if job.job.id in tenth)
    return found


def jittered(rows: Sequence[TraceRequest], seed: int) -> list[TraceRequest]:
    random, step_s = Random(seed), PROFILE.decode(1)
    late = (replace(row, arrival_s=row.arrival_s + step_s * random.random()) for row in rows)
    return sorted(late, key=lambda row: row.arrival_s)


def guessed(rows: Sequence[TraceRequest], seed: int) -> list[int]:
    """A hint for each request, within a factor of two of its output."""
    random = Random(f"hints {seed}")
    return [max(1, round(row.output_tokens * 2 ** random.uniform(-1, 1))) for row in rows]


def cell(place: tuple[str, str, str], seed: int, count: int, traces: Path, price: float) -> dict[str, Any]:
    """Every system on the same requests; by system the ratios over FCFS as it is, `host` those of ours over it with host KV."""
    workload, regime, load = place
    rows = workloads.lengths(workload, count, seed, traces)
    here = workloads.regime(regime, rows)
    trace = workloads.arriving(rows, load, here.fitting, PROFILE, seed, workloads.cv(workload))

    def run(settings: SchedulerSettings, requests: Sequence[TraceRequest] = trace, **given: Any) -> Outcome:
        return simulate(requests, PROFILE, replace(settings, batch=here.batch), here.machine, **given)

    base, ours = run(SchedulerSettings(STOCK)), run(SchedulerSettings(OURS, price=price))
    found: dict[str, Any] = {OURS: over(base, ours)}
    if here.machine.device_blocks is not None:
        host = run(SchedulerSettings(STOCK, strategy="proactive"))
        found |= {HOST: over(base, host), "against host KV": over(host, ours)}
        if seed == 1:
            kept = SchedulerSettings(OURS, price=price, strategy="proactive")
            found[KEPT] = over(base, run(kept))
    found[CONTROL] = over(base, run(SchedulerSettings(STOCK), jittered(trace, seed)))
    if seed == 1 and load == "1.1" and workload != "drift" and regime in ("slots bind", "KV binds 3x"):
        found |= {name: over(base, run(settings)) for name, settings in ORACLES.items()}
    if workload in workloads.HEAVY and load == "1.1" and here.machine.device_blocks is not None:
        hinted = run(SchedulerSettings(OURS, price=price), hints=guessed(trace, seed))
        found[HINTED] = over(base, hinted)
    return found


def places() -> Iterator[tuple[str, str, str]]:
    return (
        (workload, regime, load)
        for workload in workloads.WORKLOADS
        for regime in workloads.REGIMES
        for load in workloads.LOADS
    )


def needed(place: tuple[str, str, str], seed: int) -> bool:
    """What never differs, nothing being short, is shown on one seed and two loads; the drift, five times as long, on three."""
    if place[1] == "nothing binds":
        return seed == 1 and place[2] in ("1.1", "burst")
    return place[0] != "drift" or seed <= 3


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each cell: the medians over its seeds, of each metric of each system."""
    until = time.monotonic() + 60 * options.minutes
    runs: dict[tuple[str, str, str], list[dict[str, Any]]] = {place: [] for place in places()}
    for seed in range(1, options.seeds + 1):
        order = list(places())
        Random(f"order {seed}").shuffle(order)
        for place in order:
            if time.monotonic() < until and needed(place, seed):
                found = cell(place, seed, options.requests, options.traces, options.price)
                runs[place].append(found)
                shown = " ".join(f"{found[OURS][name]:.2f}" for name in (*METRICS, "worst"))
                print(*place, seed, shown, flush=True)
    return [row(place, found) for place, found in runs.items() if found]


def row(place: tuple[str, str, str], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    systems = {name for found in runs for name in found}
    return {
        "workload": place[0],
        "regime": place[1],
        "load": place[2],
        "seeds": len(runs),
        "over_fcfs": {name: _medians([f[name] for f in runs if name in f]) for name in sorted(systems)},
        "range": {
            name: [round(pick(f[OURS][name] for f in runs), 3) for pick in (min, max)]
            for name in (*METRICS, "worst")
        },
    }


def _medians(found: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(median(one[name] for one in found), 4) for name in (*METRICS, "worst")}


def bars(rows: Sequence[dict[str, Any]], against: str = OURS) -> dict[str, Any]:
    """The share of cells that keep the bar, and which miss it, by the bar that they miss."""
    cells = [(one, one["over_fcfs"][against]) for one in rows if against in one["over_fcfs"]]
    least = [min(found[name] for name in BARRED) for _, found in cells]
    wanted = [
        _missed(one, found, BARRED, WANTED) for one, found in cells if min(found[n] for n in BARRED) < WANTED
    ]
    return {
        "cells": len(cells),
        "share_above_wanted": 1 - len(wanted) / max(1, len(cells)),
        "least": min(least, default=None),
        "least_throughput": min((found["throughput"] for _, found in cells), default=None),
        "worst_of_longest": max((found["worst"] for _, found in cells), default=None),
        "below_wanted": wanted,
        "below_least": [_missed(o, f, BARRED, LEAST) for o, f in cells if min(f[n] for n in BARRED) < LEAST],
        "throughput_missed": [
            _missed(o, f, ("throughput",), THROUGHPUT) for o, f in cells if f["throughput"] < THROUGHPUT
        ],
        "worst_missed": [_place(o) + f" {f['worst']:.2f}x" for o, f in cells if f["worst"] > WORST],
    }


def _place(one: dict[str, Any]) -> str:
    return f"{one['workload']}, {one['regime']}, {one['load']}"


def _missed(one: dict[str, Any], found: dict[str, float], names: Sequence[str], bar: float) -> str:
    return f"{_place(one)}: " + ", ".join(f"{n} {found[n]:.3f}x" for n in names if found[n] < bar)


def heavy(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Heavy tails at load 1.1 where KV binds, without and with a hint."""
    found = []
    for one in rows:
        if one["workload"] in workloads.HEAVY and one["load"] == "1.1" and one["regime"].startswith("KV"):
            ours, hint = (one["over_fcfs"][name] for name in (OURS, HINTED))
            bar = workloads.HEAVY[one["workload"]]
            met = hint["mean"] >= HINT and hint["longest"] >= HINT_LONGEST
            place = {"workload": one["workload"], "regime": one["regime"], "bar": bar}
            mean = {"mean": ours["mean"], "met": ours["mean"] >= bar}
            found.append(place | mean | {"hinted": hint["mean"], "longest": hint["longest"], "hint_met": met})
    return found


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, required=True, help="where the traces lie")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--price", type=float, default=0.1)
    options = parser.parse_args(argv)
    started = time.process_time()
    rows = run(options)
    judged = {"as it is": bars(rows), "with the same host KV": bars(rows, "against host KV")}
    for name, found in judged.items():
        print(name, found, sep="\n")
    given = [arg for arg in argv if arg != str(options.traces)]
    finish(
        "express-grid",
        {
            "kind": "simulated",
            "date": facts.today(),
            "command": ["python", "benchmarks/express_grid.py", *given],
            "price": options.price,
            "requests": options.requests,
            "seeds": options.seeds,
            "cpu_s": time.process_time() - started,
            "bars": judged,
            "control": bars(rows, CONTROL),
            "heavy": heavy(rows),
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main(sys.argv[1:])
