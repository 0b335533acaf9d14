"""What starvation prevention gives and takes: the limit alpha, its tempering, and a share of the time by arrival. Simulated.

The physics: a job that waited alpha goes to the first queue. Once everybody waits longer than alpha, everybody is promoted
and the queues are round robin; an alpha that nobody reaches leaves the long jobs to wait for the whole queue. A share s of
the time in order of arrival keeps latencies within 1/s of those of first come, first served, instead, as far as iterations
take the same whoever is in them; prompts and batches of unequal cost make that approximate.

Workload and loads are those of `live_scheduling.py` (B = 4, memory for everybody), iteration times the measured ones of
tiny-llama; the engine is the simulator. Ratios are FCFS over ours within a seed, medians over seeds; slowdowns are of single
requests, over all seeds, and `late_s` is the most by which one exceeds 1/s.

    python benchmarks/starvation.py
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, median

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from live import workloads  # noqa: E402

from benchmarks.common import finish  # noqa: E402
from coldstart.measure.bench import facts  # noqa: E402
from coldstart.measure.replay.metrics import percentile  # noqa: E402
from coldstart.scheduling import IterationProfile, SchedulerSettings  # noqa: E402
from coldstart.scheduling.simulate import Outcome, SimSettings, simulate  # noqa: E402

BATCH, SEEDS = 4, 9
PROFILE = HERE / "results" / "iteration-profile-cpu.json"
PAPER = SchedulerSettings(alpha_s=0.3, alpha_scale=0.0, promoted_cap=None)
WAYS: dict[str, tuple[SchedulerSettings, float]] = {
    "alpha 0.3 s": (PAPER, 0.0),
    "alpha 0.3 s, scaled, capped": (SchedulerSettings(alpha_s=0.3, alpha_scale=4.0, promoted_cap=0.25), 0.0),
    "alpha 1 s": (SchedulerSettings(alpha_s=1.0, alpha_scale=0.0, promoted_cap=None), 0.0),
    "alpha 3 s": (SchedulerSettings(alpha_s=3.0, alpha_scale=0.0, promoted_cap=None), 0.0),
    "alpha 3 s, scaled, capped": (SchedulerSettings(alpha_s=3.0, alpha_scale=4.0, promoted_cap=0.25), 0.0),
    "alpha 60 s": (SchedulerSettings(alpha_s=60.0, alpha_scale=0.0, promoted_cap=None), 0.0),
    "alpha 3 s, oldest share 0.25": (
        SchedulerSettings(alpha_s=3.0, alpha_scale=0.0, promoted_cap=None),
        0.25,
    ),
    "alpha 3 s, oldest share 0.5": (SchedulerSettings(alpha_s=3.0, alpha_scale=0.0, promoted_cap=None), 0.5),
    "alpha 3 s, oldest share 0.75": (
        SchedulerSettings(alpha_s=3.0, alpha_scale=0.0, promoted_cap=None),
        0.75,
    ),
}


def outcome(
    policy: str, tunables: SchedulerSettings, share: float, load: str, seed: int, times: IterationProfile
) -> Outcome:
    rate = 1 / fmean(
        times.prefill(row.prompt_tokens) + row.output_tokens * times.decode(BATCH) / BATCH
        for row in workloads.lengths("skewed", 2000, 1)
    )
    rows = workloads.arriving("skewed", load, rate, seed, workloads.count_of("skewed", load, rate))
    settings = replace(tunables, policy=policy, batch=BATCH, oldest_share=share)
    return simulate(rows, times, settings, SimSettings(context_s=0.0, depth=1))


def compared(ours: Outcome, fcfs: Outcome) -> dict[str, float]:
    """Ratios above 1 are improvements; slowdowns are of single requests."""
    latency, base = _latencies(ours), _latencies(fcfs)
    tokens = [job.output for job in fcfs.jobs]
    per_token, base_per_token = (
        sorted(x / n for x, n in zip(found, tokens, strict=True)) for found in (latency, base)
    )
    slowdowns = sorted(mine / theirs for mine, theirs in zip(latency, base, strict=True))
    return {
        "mean": fmean(base_per_token) / fmean(per_token),
        "p95": percentile(base_per_token, 95) / percentile(per_token, 95),
        "slowest": slowdowns[-1],
        "above_2": sum(factor > 2 for factor in slowdowns),
        "requests": len(slowdowns),
    }


def late_s(ours: Outcome, fcfs: Outcome, share: float) -> float:
    """The most by which a latency exceeds 1/share times that of first come, first served."""
    pairs = zip(_latencies(ours), _latencies(fcfs), strict=True)
    return max(0.0, *(mine - theirs / share for mine, theirs in pairs))


def _latencies(found: Outcome) -> list[float]:
    return [job.finished_s - job.job.arrival_s for job in found.jobs if job.finished_s is not None]


def main() -> None:
    """Sweep, print the table, keep it."""
    times = IterationProfile.from_json(json.loads(PROFILE.read_text())["iterations"])
    rows = []
    print(f"{'load':6} {'way':30} {'mean':>7} {'p95':>7} {'slowest':>8} {'above 2x':>9}")
    for load in workloads.LOADS:
        base = [outcome("fcfs", PAPER, 0.0, load, seed, times) for seed in range(SEEDS)]
        for way, (tunables, share) in WAYS.items():
            ours = [outcome("skip-join-mlfq", tunables, share, load, seed, times) for seed in range(SEEDS)]
            each = list(map(compared, ours, base))
            found = {name: median(one[name] for one in each) for name in ("mean", "p95")}
            found["slowest"] = max(one["slowest"] for one in each)
            if share:
                found["late_s"] = max(late_s(*pair, share) for pair in zip(ours, base, strict=True))
            found |= {name: sum(one[name] for one in each) for name in ("above_2", "requests")}
            rows.append({"load": load, "way": way, **found})
            print(
                f"{load:6} {way:30} {found['mean']:6.2f}x {found['p95']:6.2f}x {found['slowest']:7.1f}x"
                f" {found['above_2'] / found['requests']:9.2%}"
            )
    finish(
        "starvation",
        {
            "kind": "simulated",
            "date": facts.today(),
            "command": "python benchmarks/starvation.py",
            "batch": BATCH,
            "seeds": SEEDS,
            "profile": PROFILE.name,
            "settings": {
                way: {**asdict(tunables), "oldest_share": share} for way, (tunables, share) in WAYS.items()
            },
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
