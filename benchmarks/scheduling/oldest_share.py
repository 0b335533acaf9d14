"""Gain and cost of starvation prevention: alpha, its tempering, and a share of the time by arrival. Simulated.

A job that waited alpha goes to the first queue. Once every job has waited longer, the queues are round robin. A share s of the
time in order of arrival keeps latencies within 1/s of those of FCFS as long as iterations take equal time. Workload and
loads are those of `scheduling/live_server` (B = 4, memory for every request), iteration times those measured for
tiny-llama. Ratios are FCFS over ours within a seed, medians over seeds; `late_s` is the most by which a request exceeds 1/s.

Run: python -m benchmarks scheduling/oldest_share
Time: about 2 minutes
Result: starvation.json
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from statistics import fmean, median

from benchmarks.common import RESULTS, command_line, finish
from benchmarks.scheduling.live import workloads
from coldstart.bench import facts
from coldstart.lab.replay.metrics import percentile
from coldstart.lab.scheduling import Outcome, SimSettings, simulate
from coldstart.scheduling import IterationProfile, SchedulerSettings

BATCH, SEEDS = 4, 9
PROFILE = RESULTS / "iteration-profile-cpu.json"
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
    rows = workloads.arriving("skewed", load, rate, seed, workloads.request_count("skewed", load, rate))
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
    times = IterationProfile.parse(json.loads(PROFILE.read_text())["iterations"])
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
            "command": command_line(),
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
