"""FastServe's Figure 14: four policies over the ratio of input to output length, OPT-13B. Simulated.

Lengths of the Azure conversation trace and of a log-normal workload with a long tail are scaled so that their means have the
ratio and the mean total stays. Memory is not limited. Paper: skip-join is up to 8.9x better than FCFS, 1.87x than naive MLFQ,
13.9x than fixed priority.

Run: python -m benchmarks scheduling/figure14
Time: about 5 minutes
Result: figure14.json
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from statistics import fmean

from benchmarks.common import finish
from benchmarks.scheduling.opt import OPT_13B, capacity, cv, lengths, per_token, poisson, skewed
from coldstart.lab.scheduling import simulate
from coldstart.lab.traces import TraceRequest
from coldstart.scheduling import SchedulerSettings

PAPER = {"fcfs": 8.9, "naive-mlfq": 1.87, "fixed-priority": 13.9}
SOURCES: dict[str, Callable[[int], list[TraceRequest]]] = {"azure": lengths, "log-normal": skewed}
TEMPERED = SchedulerSettings()
PATIENT = SchedulerSettings(alpha_s=60.0, alpha_scale=0.0, promoted_cap=None)
POLICIES = {
    "fcfs": ("fcfs", TEMPERED),
    "fixed-priority": ("fixed-priority", TEMPERED),
    "naive-mlfq": ("naive-mlfq", TEMPERED),
    "skip-join-mlfq": ("skip-join-mlfq", TEMPERED),
    "naive-mlfq, alpha 60 s": ("naive-mlfq", PATIENT),
    "skip-join-mlfq, alpha 60 s": ("skip-join-mlfq", PATIENT),
    "srpt": ("srpt", TEMPERED),
}
RATIOS, LOADS, REQUESTS, BATCH = (0.25, 1, 4, 16, 64, 256), (0.9, 1.2), 250, 8


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


def latencies(source: str, ratio: float, load: float) -> dict[str, float]:
    profile = OPT_13B.profile()
    rows = split(SOURCES[source](REQUESTS), ratio)
    rate = load * capacity(profile, rows, BATCH)
    engine, found = OPT_13B.engine(device_blocks=None), {}
    for label, (name, tunables) in POLICIES.items():
        settings = replace(tunables, policy=name, batch=BATCH)
        found[label] = per_token(simulate(poisson(rows, rate, 1), profile, settings, engine))
    return found


def main() -> None:
    rows = [
        {"lengths": source, "load": load, "ratio": ratio, "s_per_token": latencies(source, ratio, load)}
        for source, load, ratio in product(SOURCES, LOADS, RATIOS)
    ]
    spread = {s: cv([row.output_tokens for row in make(REQUESTS)]) for s, make in SOURCES.items()}
    result = {"kind": "simulated", "paper_most": PAPER, "cv_of_outputs": spread}
    finish("figure14", {**result, "rows": rows})


if __name__ == "__main__":
    main()
