"""Which batch skip-join MLFQ should have where nobody says: all slots, or fewer? Simulated.

The physics: parking somebody gains only what it makes the others faster. Iterations that cost the same with fewer requests
in them (small batches, which read the weights anyway) gain nothing, iterations in proportion to their batch gain all.
Where KV memory binds it caps the batch by itself, and the order within it is what matters. Times are the measured profile
of tiny-llama on two cores (results/iteration-profile-cpu.json); load 1 is what a full batch of those that fit decodes.

    python benchmarks/batch_choice.py
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import RESULTS, capacity, finish, per_token, poisson, skewed
from coldstart.scheduling import IterationProfile, SchedulerSettings
from coldstart.scheduling.simulate import Outcome, SimSettings, simulate
from coldstart.traces import TraceRequest

SLOTS, BLOCK_TOKENS, BLOCK_BYTES, LINK = 256, 32, 163840, 8e9
POOLS = {"KV for everybody": 4096, "KV binds": 96}
BATCHES, LOADS, SEEDS, REQUESTS = (4, 8, 16, 32, 64, SLOTS), (0.7, 0.9, 1.1), (1, 2, 3, 4, 5), 400
TUNABLES = SchedulerSettings(alpha_s=3.0, alpha_scale=4.0, promoted_cap=0.25)
MOST_PAYING = 64


def run(rows: list[TraceRequest], policy: str, batch: int, blocks: int, profile: IterationProfile) -> Outcome:
    machine = SimSettings(
        slots=SLOTS,
        block_tokens=BLOCK_TOKENS,
        device_blocks=blocks,
        block_bytes=BLOCK_BYTES,
        link_bytes_s=LINK,
    )
    return simulate(rows, profile, replace(TUNABLES, policy=policy, batch=batch), machine)


def longest_s(outcome: Outcome) -> float:
    """Mean latency of the tenth with the longest answers."""
    ordered = sorted(outcome.jobs, key=lambda job: -job.output)[: len(outcome.jobs) // 10]
    return fmean((job.finished_s or 0.0) - job.job.arrival_s for job in ordered)


def row(pool: str, load: float, profile: IterationProfile) -> dict[str, Any]:
    """Each batch against FCFS with all slots, means over the seeds."""
    found: dict[int, list[tuple[float, float]]] = {batch: [] for batch in BATCHES}
    for seed in SEEDS:
        rows = arriving(pool, load, profile, seed)
        base = run(rows, "fcfs", SLOTS, POOLS[pool], profile)
        for batch in BATCHES:
            ours = run(rows, "skip-join-mlfq", batch, POOLS[pool], profile)
            ratios = (per_token(base) / per_token(ours), longest_s(base) / longest_s(ours))
            found[batch].append(ratios)
    gains = {batch: fmean(each for each, _ in pairs) for batch, pairs in found.items()}
    longest = {batch: fmean(each for _, each in pairs) for batch, pairs in found.items()}
    print(f"{pool}, load {load}: " + ", ".join(f"B={b} {g:.2f}x" for b, g in gains.items()), flush=True)
    return {"pool": pool, "load": load, "over_fcfs": gains, "longest_over_fcfs": longest}


def arriving(pool: str, load: float, profile: IterationProfile, seed: int) -> list[TraceRequest]:
    rows = skewed(REQUESTS, seed)
    held = fmean((r.prompt_tokens + r.output_tokens / 2) / BLOCK_TOKENS + 1 for r in rows)
    batch = max(1, min(MOST_PAYING, int(POOLS[pool] / held)))
    return list(poisson(rows, load * capacity(profile, rows, batch), seed))


def main() -> None:
    document = json.loads((RESULTS / "iteration-profile-cpu.json").read_text())
    profile = IterationProfile.from_json(document["iterations"])
    rows = [row(pool, load, profile) for pool in POOLS for load in LOADS]
    finish("batch-choice", {"kind": "simulated", "slots": SLOTS, "seeds": len(SEEDS), "rows": rows})


if __name__ == "__main__":
    main()
