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
from coldstart.lab.scheduling import simulate
from coldstart.lab.traces.transform import cap_tokens, cut
from coldstart.scheduling import SchedulerSettings

PAPER_RATIO, SECONDS, BLOCK = 7.0, 5.0, 16


def peak_gb(policy: str, batch: int, seed: int) -> float:
    """Return the peak of the KV memory in GB."""
    rows = cut(poisson(list(cap_tokens(lengths(1000), None, 20)), 64, seed, cv=4), SECONDS, None)
    settings = SchedulerSettings(policy, batch=batch, alpha_scale=0.0, promoted_cap=None)
    engine = OPT_2_7B.engine(BLOCK, device_blocks=10**9)
    outcome = simulate(rows, OPT_2_7B.profile(), settings, engine)
    return outcome.peak_blocks * OPT_2_7B.kv_bytes_per_token * BLOCK / 1e9


def main() -> None:
    rows = []
    for batch in (16, 32, 64):
        for seed in range(3):
            ours, fcfs = (peak_gb(policy, batch, seed) for policy in ("skip-join-mlfq", "fcfs"))
            rows.append(
                {"batch": batch, "seed": seed, "mlfq_gb": ours, "fcfs_gb": fcfs, "ratio": ours / fcfs}
            )
    finish("figure8", {"kind": "simulated", "paper_ratio": PAPER_RATIO, "rows": rows})


if __name__ == "__main__":
    main()
