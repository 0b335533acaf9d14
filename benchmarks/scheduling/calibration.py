"""Error of the simulator against real vLLM on this CPU: the same requests served live and simulated.

Iteration times come from the bundle's profile or from probes, requests that are sent to the same server at the start of each
repetition. The time of a request outside the engine is probed in both cases. Nothing is fitted to the compared runs. At load
x an iteration time that is off by d moves the TTFT by about d / (1 - x), so the load is well below 1. `paced` and
`bundle-paced` correct the times by a fixed amount of work that is timed before and after each run.

Error = |simulated - live| / live of the mean TTFT and TPOT over all repetitions, and the median over single runs. Traces: Azure
and Mooncake conversations with divided lengths and their own arrivals, and log-normal lengths with Poisson arrivals. The
simulator has no prefix cache, so the requests share no prefixes.

Run: python -m benchmarks scheduling/calibration [--repetitions N] [--seconds S] [--load L]
Time: about 30 minutes
Result: scheduling-calibration.json
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.common import RESULTS, command_line
from benchmarks.scheduling.live import model, workloads
from benchmarks.scheduling.live.cells import OURS, REGIMES
from benchmarks.scheduling.live.measure import send
from benchmarks.scheduling.live.names import BASELINE, MLFQ
from benchmarks.scheduling.live.servers import Fleet, Server, bind_client
from benchmarks.scheduling.probes import Probes, pace, paces, probe
from coldstart.bench import facts
from coldstart.lab.replay import RequestRecord, build_records
from coldstart.lab.scheduling import Outcome, SimSettings, simulate
from coldstart.lab.traces import TraceRequest
from coldstart.lab.traces.arrivals import rearrive
from coldstart.models import inspection
from coldstart.scheduling import IterationProfile, SchedulerSettings

RESULT = RESULTS / "scheduling-calibration.json"
REGIME = REGIMES["batch-bound"]
POLICIES = {BASELINE: "fcfs", MLFQ: "skip-join-mlfq"}
SOURCES = ("paced", "probes", "bundle-paced", "bundle")
METRICS = ("ttft_s", "tpot_s")
TRACES = ("azure", "mooncake", "synthetic")
LIMIT = 0.15
Row = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Probe, replay, simulate, write the result, print the table and one line of JSON."""
    options = _options(argv)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # servers must not outlive this
    machine = facts.machine()  # before this process binds itself to some of the cores
    bind_client()
    with tempfile.TemporaryDirectory(prefix="calibration-") as work:
        fleet = Fleet(Path(work))
        try:
            servers = {name: _server(fleet, name) for name in POLICIES}
            bundle, parameters = iterations(), list[Row]()
            runs = list(_runs(options, servers, bundle, parameters))
        finally:
            fleet.close()
    result = document(runs, argv) | {"machine": machine, "load": options.load}
    result["parameters"] = {"bundle": bundle.encode(), "probes": parameters}
    options.result.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k not in ("cells", "runs", "parameters")}))
    return 0


def iterations() -> IterationProfile:
    """The profile in the bundle that the servers start from. Raises SystemExit without one."""
    asked = REGIME.bundle(str(model.build()))
    found = inspection.look_up(asked.model, asked.vllm_args).bundle
    if found is None:
        raise SystemExit("the servers run, but their bundle is not in the store")
    return IterationProfile.parse(found.json("iterations"))


def _server(fleet: Fleet, name: str) -> Server:
    return fleet.server(name, REGIME.bundle(str(model.build())), REGIME.schedulers[name])


def _runs(
    options: argparse.Namespace, servers: Mapping[str, Server], bundle: IterationProfile, used: list[Row]
) -> Iterator[Row]:
    """Repetition by repetition, its probes first (into `used`); then the policies in turn on the same requests."""
    seeds = count(200_000)
    for repetition in range(options.repetitions):
        probed = {name: probe(server, REGIME.batch, seeds) for name, server in servers.items()}
        used += [
            {"policy": name, "repetition": repetition, **_told(name, probed[name], bundle)} for name in probed
        ]
        for number, trace in enumerate(TRACES):
            seed = 1000 * (repetition + 1) + number
            rows = requests(trace, options.load, options.seconds, probed[BASELINE].profile(), seed)
            for name in sorted(POLICIES, reverse=bool(repetition % 2)):
                live, pace_s = _served(servers[name], rows, seed, seeds)
                found = simulated(name, rows, probed[name], bundle, pace_s)
                print(f"{trace} {name} {repetition}: {live} {found}", file=sys.stderr)
                place = {"trace": trace, "policy": name, "repetition": repetition}
                yield {**place, "requests": len(rows), "pace_s": pace_s, "live": live, "simulated": found}


def _served(
    server: Server, rows: Sequence[TraceRequest], seed: int, seeds: Iterator[int]
) -> tuple[dict[str, float], float]:
    """The means of a live run, and the seconds that a fixed work took around it."""
    before = pace(server, REGIME.batch, seeds)
    live = marks(send(server, rows, seed))
    after = pace(server, REGIME.batch, seeds)
    return live, fmean((before, after))


def requests(
    trace: str, load: float, seconds: float, profile: IterationProfile, seed: int
) -> list[TraceRequest]:
    """`seconds` of work at load 1; load 1 is what a full batch of these lengths decodes, by the probed times."""
    sample = workloads.lengths("skewed" if trace == "synthetic" else trace, 500, seed)
    each = fmean(
        profile.prefill(r.prompt_tokens) + r.output_tokens * profile.decode(REGIME.batch) / REGIME.batch
        for r in sample
    )
    rows = sample[: min(len(sample), max(workloads.FEWEST, round(seconds / each)))]
    if trace == "synthetic":
        return list(rearrive(rows, load / each, 1.0, seed))
    factor = len(rows) * each / load / max(rows[-1].arrival_s, 1e-9)
    return [replace(row, arrival_s=row.arrival_s * factor) for row in rows]


def simulated(
    name: str, rows: Sequence[TraceRequest], probed: Probes, bundle: IterationProfile, pace_s: float
) -> dict[str, dict[str, float]]:
    """The means on the simulated engine by SOURCES. What is not an iteration's time is the probes' in all of them."""
    told = scheduler(name, bundle)
    settings, paced = probed.settings(told), probed.paced(pace_s / probed.pace_s)
    expected_s = simulate(paces(REGIME.batch), bundle, told, settings).finished_s
    times = {
        "paced": (paced.profile(), paced.settings(told)),
        "probes": (probed.profile(), settings),
        "bundle-paced": (slower(bundle, pace_s / expected_s), settings),
        "bundle": (bundle, settings),
    }
    return {source: marks(build_records(_simulated(rows, told, *times[source]))) for source in SOURCES}


def slower(profile: IterationProfile, factor: float) -> IterationProfile:
    """The profile of a machine that takes `factor` times as long."""
    curves = profile.encode().items()
    return IterationProfile.parse({name: [[x, factor * y] for x, y in points] for name, points in curves})


def _simulated(
    rows: Sequence[TraceRequest], told: SchedulerSettings, profile: IterationProfile, machine: SimSettings
) -> Outcome:
    return simulate(rows, profile, told, machine)


def scheduler(name: str, bundle: IterationProfile) -> SchedulerSettings:
    """The server's, which predicts by the bundle's profile."""
    alpha_s = float(OURS[OURS.index("--alpha") + 1])
    return SchedulerSettings(POLICIES[name], REGIME.batch, alpha_s=alpha_s, profile=bundle.encode())


def marks(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Means of METRICS, in seconds."""
    found = {name: [getattr(record, name) for record in records] for name in METRICS}
    return {name: fmean(v for v in values if v is not None) for name, values in found.items()}


def document(runs: Sequence[Row], argv: Sequence[str]) -> Row:
    """The result file."""
    cells = [cell(runs, trace, name) for trace in TRACES for name in POLICIES]
    return {
        "benchmark": "scheduling-calibration",
        "date": facts.today(),
        "versions": facts.versions(),
        "command": command_line(),
        "batch": REGIME.batch,
        "limit": LIMIT,
        "met": {s: all(one["error"][s][m] <= LIMIT for one in cells for m in METRICS) for s in SOURCES},
        "met_by_median": {
            s: all(abs(one["single"][s][m]["median"]) <= LIMIT for one in cells for m in METRICS)
            for s in SOURCES
        },
        "cells": cells,
        "runs": list(runs),
    }


def _told(name: str, probed: Probes, bundle: IterationProfile) -> Row:
    return probed.document() | {"crowd_s": probed.settings(scheduler(name, bundle)).crowd_s}


def cell(runs: Sequence[Row], trace: str, policy: str) -> Row:
    """One trace and policy over all repetitions."""
    mine = [run for run in runs if (run["trace"], run["policy"]) == (trace, policy)]
    live = {m: fmean(run["live"][m] for run in mine) for m in METRICS}
    means = {s: {m: fmean(run["simulated"][s][m] for run in mine) for m in METRICS} for s in SOURCES}
    return {
        "trace": trace,
        "policy": policy,
        "runs": len(mine),
        "requests": sum(run["requests"] for run in mine),
        "live": live,
        "simulated": means,
        "error": {s: {m: abs(means[s][m] / live[m] - 1) for m in METRICS} for s in SOURCES},
        "single": {s: {m: _range(mine, s, m) for m in METRICS} for s in SOURCES},
    }


def _range(runs: Sequence[Row], source: str, metric: str) -> dict[str, float]:
    """Signed relative differences of single runs."""
    found = [run["simulated"][source][metric] / run["live"][metric] - 1 for run in runs]
    return {"median": median(found), "min": min(found), "max": max(found)}


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of work at load 1, per run")
    parser.add_argument("--load", type=float, default=0.6)
    parser.add_argument("--result", type=Path, default=RESULT)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
