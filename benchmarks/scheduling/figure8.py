"""FastServe's Figure 8: KV memory over time of skip-join MLFQ and FCFS, OPT-2.7B. Simulated.

Workload of the paper: Gamma arrivals at 64/s with CV 4, at most 20 output tokens, five seconds; lengths from the Azure
conversation trace instead of ShareGPT. Memory is not limited. Paper: up to 7x.

Run: python -m benchmarks scheduling/figure8
Time: less than a minute
Result: figure8.json
"""

from __future__ import annotations

from benchmarks.common import finish
from benchmarks.scheduling.opt import OPT_2_7B, lengths, poisson
from coldstart.lab.scheduling import SimSettings, simulate
from coldstart.lab.traces.transform import cap_tokens, cut
from coldstart.scheduling import SchedulerSettings

PAPER_RATIO, SECONDS = 7.0, 5.0
BLOCK = 16
SLOTS = 4096
"""FastServe bounds the batch, not who is preempted and keeps KV: more than there are requests."""


def peak_gb(policy: str, batch: int, seed: int) -> tuple[float, list[tuple[float, float]]]:
    """Peak and series of KV memory in GB, the block the device never limits."""
    profile = OPT_2_7B.profile()
    rows = cut(poisson(list(cap_tokens(lengths(1000), None, 20)), 64, seed, cv=4), SECONDS, None)
    settings = SchedulerSettings(policy, batch=batch, alpha_scale=0.0, promoted_cap=None)
    machine = SimSettings(
        slots=SLOTS, device_blocks=10**9, block_tokens=BLOCK, context_s=OPT_2_7B.context_s, depth=1
    )
    outcome = simulate(rows, profile, settings, machine, series=True)
    gb = OPT_2_7B.kv_bytes_per_token * BLOCK / 1e9
    return outcome.peak_blocks * gb, [(when, used * gb) for when, used in outcome.kv_series]


def main() -> None:
    rows = []
    for batch in (16, 32, 64):
        for seed in range(3):
            (ours, series), (fcfs, _) = peak_gb("skip-join-mlfq", batch, seed), peak_gb("fcfs", batch, seed)
            rows.append(
                {"batch": batch, "seed": seed, "mlfq_gb": ours, "fcfs_gb": fcfs, "ratio": ours / fcfs}
            )
            print(f"B {batch:>3} seed {seed}: MLFQ {ours:6.1f} GB, FCFS {fcfs:5.1f} GB, {ours / fcfs:.1f}x")
    worst = max(row["ratio"] for row in rows)
    result = {"kind": "simulated", "paper_ratio": PAPER_RATIO, "largest_ratio": worst, "rows": rows}
    finish("figure8", {**result, "series": series[:: max(1, len(series) // 200)]})


if __name__ == "__main__":
    main()
