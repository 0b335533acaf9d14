"""The simulated engine against vLLM's real scheduler and connector classes in virtual time: counts that no pace changes.

Both serve the same requests on the same clock (an iteration takes what the simulated engine says it takes), so what differs
is the scheduler and the memory: vLLM's own there, our model of it here. Evictions, tokens computed again, blocks loaded per
evicted block, mean running; and the mean latency. Pools of a few dozen blocks, as in the KV-bound regime of the live
benchmarks; traces as in calibration.py: Azure and Mooncake conversation, scaled, and log-normal lengths.

    python benchmarks/scheduler_twin.py [--requests N] [--loads L,L]
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
logging.disable(logging.CRITICAL)

from live import workloads  # noqa: E402
from live.cells import BLOCK_BYTES  # noqa: E402

from benchmarks.common import RESULTS, finish  # noqa: E402
from coldstart.measure.bench import facts  # noqa: E402
from coldstart.scheduling import IterationProfile, SchedulerSettings  # noqa: E402
from coldstart.scheduling.simulate import Outcome, SimSettings, simulate  # noqa: E402
from coldstart.traces import TraceRequest  # noqa: E402
from coldstart.traces.arrivals import rearrive  # noqa: E402
from tests.support.scheduling.timed_double import Counts, TimedDouble  # noqa: E402

TRACES = ("azure", "mooncake", "log-normal")
SYSTEMS = {
    "fcfs": SchedulerSettings("fcfs", batch=16),
    "fcfs, host KV": SchedulerSettings("fcfs", batch=16, strategy="proactive"),
    "mlfq, recompute": SchedulerSettings(batch=16, alpha_s=3.0, strategy="recompute"),
    "mlfq, reactive": SchedulerSettings(batch=16, alpha_s=3.0, strategy="reactive"),
    "mlfq, proactive": SchedulerSettings(batch=16, alpha_s=3.0),
    "express, recompute": SchedulerSettings("express", batch=16, strategy="recompute"),
    "express": SchedulerSettings("express", batch=16),
}
MACHINE = SimSettings(
    block_tokens=32,
    device_blocks=31,
    host_blocks=1638,
    block_bytes=BLOCK_BYTES,
    link_bytes_s=8e9,
    context_s=1e-6,
)
COUNTS = ("evictions", "recomputed_tokens", "loaded_per_evicted", "mean_running", "latency_s")
LIMIT = 0.15


def requests(trace: str, load: float, count: int, profile: IterationProfile, seed: int) -> list[TraceRequest]:
    """Load 1 is what the pool's blocks, all in use, decode."""
    rows = workloads.lengths("skewed" if trace == "log-normal" else trace, count, seed)
    held = fmean((r.prompt_tokens + r.output_tokens / 2) / MACHINE.block_tokens + 0.5 for r in rows)
    batch = max(1.0, min(16.0, (MACHINE.device_blocks or 0) / held))
    each = fmean(
        profile.prefill(r.prompt_tokens) + r.output_tokens * profile.decode(round(batch)) / batch
        for r in rows
    )
    if trace == "log-normal":
        return list(rearrive(rows, load / each, 1.0, seed))
    factor = len(rows) * each / load / max(rows[-1].arrival_s, 1e-9)
    return [replace(row, arrival_s=row.arrival_s * factor) for row in rows]


def counts(found: Outcome | Counts, latencies: Sequence[float]) -> dict[str, float]:
    return {
        "evictions": found.evictions,
        "recomputed_tokens": found.recomputed_tokens,
        "loaded_per_evicted": found.blocks_in / max(1, found.blocks_evicted),
        "mean_running": found.mean_running,
        "latency_s": fmean(latencies),
        "iterations": found.iterations,
    }


def cell(
    folder: Path, trace: str, system: str, load: float, count: int, profile: IterationProfile, seed: int
) -> dict[str, Any]:
    rows = requests(trace, load, count, profile, seed)
    settings = SYSTEMS[system]
    ours = simulate(rows, profile, settings, MACHINE)
    mine = counts(ours, [(job.finished_s or 0.0) - job.job.arrival_s for job in ours.jobs])
    real = TimedDouble(folder, profile, settings, MACHINE).run(rows)
    theirs = counts(real, [real.latencies[str(i)] - row.arrival_s for i, row in enumerate(rows)])
    found = {"trace": trace, "system": system, "load": load, "seed": seed, "requests": len(rows)}
    return {**found, "simulated": mine, "real": theirs}


def errors(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Relative errors of the sums over loads and seeds, by trace and system; None where the real count is zero in both."""
    found: dict[str, dict[str, float | None]] = {}
    for trace in TRACES:
        for system in SYSTEMS:
            mine = [row for row in rows if (row["trace"], row["system"]) == (trace, system)]
            found[f"{trace}, {system}"] = {name: _error(mine, name) for name in COUNTS}
    return found


def _error(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    ours, real = (sum(row[side][name] for row in rows) for side in ("simulated", "real"))
    if not real:
        return None if not ours else float("inf")
    return float(ours / real - 1)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--loads", default="0.9,1.1")
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args(argv)
    document = json.loads((RESULTS / "iteration-profile-cpu.json").read_text())
    profile = IterationProfile.from_json(document["iterations"])
    loads, rows = [float(load) for load in options.loads.split(",")], []
    with tempfile.TemporaryDirectory(prefix="twin-") as work:
        for trace in TRACES:
            for system in SYSTEMS:
                for load in loads:
                    for seed in range(1, options.seeds + 1):
                        row = cell(Path(work) / "model", trace, system, load, options.requests, profile, seed)
                        rows.append(row)
                        print(trace, system, load, seed, row["simulated"], row["real"], flush=True)
    each = errors(rows)
    worst = max(abs(e) for found in each.values() for e in found.values() if e is not None)
    identical = sum(row["simulated"] == row["real"] for row in rows)
    result = {
        "kind": "simulated",
        "against": "vLLM's scheduler and offloading connector, in virtual time",
        "date": facts.today(),
        "versions": facts.versions(),
        "command": ["python", "benchmarks/scheduler_twin.py", *argv],
        "limit": LIMIT,
        "worst_error": worst,
        "met": worst <= LIMIT,
        "identical_runs": identical,
        "runs": len(rows),
        "errors": each,
    }
    finish("scheduler-twin", {**result, "rows": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
