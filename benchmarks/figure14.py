"""FastServe's Figure 14: four policies over the ratio of input to output length, OPT-13B, simulated.

Inputs and outputs of the Azure conversation trace are scaled by one factor each, so that their means have the
ratio and the mean total stays; both distributions keep their shape. The rate follows the load. Memory is not
limited: this isolates the order. Paper: skip-join is up to 8.9x better than FCFS, 1.87x than naive MLFQ,
13.9x than fixed priority. Run: python benchmarks/figure14.py
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import OPT_13B, capacity, finish, lengths, per_token, poisson
from coldstart.scheduling import MlfqSettings, make_policy
from coldstart.simulate import SimSettings, simulate
from coldstart.traces import TraceRequest

PAPER = {"fcfs": 8.9, "naive-mlfq": 1.87, "fixed-priority": 13.9}
TEMPERED, PATIENT = MlfqSettings(alpha_scale=4.0, promoted_cap=0.25), MlfqSettings(alpha_s=60.0)
POLICIES = {
    "fcfs": ("fcfs", TEMPERED),
    "fixed-priority": ("fixed-priority", TEMPERED),
    "naive-mlfq": ("naive-mlfq", TEMPERED),
    "skip-join-mlfq": ("skip-join-mlfq", TEMPERED),
    "naive-mlfq, alpha 60 s": ("naive-mlfq", PATIENT),
    "skip-join-mlfq, alpha 60 s": ("skip-join-mlfq", PATIENT),
    "srpt": ("srpt", TEMPERED),
}
RATIOS, LOADS, REQUESTS, BATCH = (0.25, 1, 4, 16, 64, 256), (0.9, 1.2), 600, 8


def split(rows: list[TraceRequest], ratio: float) -> list[TraceRequest]:
    """Scale both lengths to mean input / mean output = ratio, at least one token each."""
    prompt, output = fmean(r.prompt_tokens for r in rows), fmean(r.output_tokens for r in rows)
    total = prompt + output
    more, less = total * ratio / (1 + ratio) / prompt, total / (1 + ratio) / output
    return [
        replace(
            row,
            prompt_tokens=max(1, round(row.prompt_tokens * more)),
            output_tokens=max(1, round(row.output_tokens * less)),
        )
        for row in rows
    ]


def latencies(ratio: float, load: float) -> dict[str, float]:
    profile = OPT_13B.profile()
    rows = split(lengths(REQUESTS), ratio)
    rate = load * capacity(profile, rows, BATCH)
    settings = SimSettings(batch=BATCH)
    found = {}
    for label, (name, tunables) in POLICIES.items():
        policy = make_policy(name, profile, tunables)
        found[label] = per_token(simulate(poisson(rows, rate, 1), policy, profile, settings))
    return found


def main() -> None:
    rows = []
    for load in LOADS:
        for ratio in RATIOS:
            found = latencies(ratio, load)
            over = {name: seconds / found["skip-join-mlfq"] for name, seconds in found.items()}
            rows.append({"load": load, "ratio": ratio, "s_per_token": found, "over_skip_join": over})
            print(
                f"load {load} ratio {ratio:>6}: " + ", ".join(f"{n} {x:.2f}x" for n, x in over.items()),
                flush=True,
            )
    most = {name: max(row["over_skip_join"][name] for row in rows) for name in POLICIES}  # type: ignore[index]
    least = {name: min(row["over_skip_join"][name] for row in rows) for name in POLICIES}  # type: ignore[index]
    finish("figure14", {"kind": "simulated", "paper_most": PAPER, "most": most, "least": least, "rows": rows})


if __name__ == "__main__":
    main()
