"""Deadlines against first come, first served, on vLLM's own scheduler with a virtual clock. Simulated.

The model is the roofline of OPT-13B (`figures.py`), whose KV memory holds about 24,000 tokens here. Arrivals are Poisson.
A ratio is FCFS over deadline, so above 1 is a gain; `longest` is the mean latency of the tenth of requests with the longest
outputs.

Run: python -m benchmarks scheduling/deadline
Time: about 4 minutes
Result: deadline-simulated.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from statistics import fmean, geometric_mean
from typing import Any

from benchmarks.common import finish, parser
from benchmarks.scheduling.figures import OPT_13B, capacity, lengths, simulate, skewed
from coldstart.lab.engine import EngineSimulator
from coldstart.lab.plan import rearrive
from coldstart.lab.traces import TraceRequest
from coldstart.scheduling import SchedulerSettings

BATCH, REQUESTS, BLOCKS = 32, 150, 1536
LOADS, SEEDS = (0.5, 0.7, 0.9, 1.1), (1, 2)


def figures_of(done: EngineSimulator) -> dict[str, float]:
    """Return the mean TTFT, its 95th percentile, and the mean latency of the longest tenth, in seconds."""
    first = sorted(record.ttft_s or 0.0 for record in done.records)
    longest = sorted(done.records, key=lambda record: record.output_tokens)[-len(first) // 10 :]
    return {
        "ttft_s": fmean(first),
        "p95_ttft_s": first[int(0.95 * len(first))],
        "longest_s": fmean(record.latency_s or 0.0 for record in longest),
    }


def compare(rows: list[TraceRequest], load: float, seed: int) -> dict[str, Any]:
    arrivals = list(rearrive(rows, load * capacity(OPT_13B, rows, BATCH), 1, seed))
    own = SchedulerSettings(batch=BATCH)
    measured = {
        policy: figures_of(simulate(OPT_13B, arrivals, replace(own, policy=policy), device_blocks=BLOCKS))
        for policy in ("fcfs", "deadline")
    }
    ratios = {name: measured["fcfs"][name] / measured["deadline"][name] for name in measured["fcfs"]}
    return {"load": load, "seed": seed, **measured, "ratios": ratios}


def main(argv: list[str]) -> None:
    parser(__doc__).parse_args(argv)
    sources: dict[str, Callable[[int], list[TraceRequest]]] = {"azure": lengths, "log-normal": skewed}
    cells = [
        {"lengths": name, **compare(source(REQUESTS), load, seed)}
        for (name, source), load, seed in product(sources.items(), LOADS, SEEDS)
    ]
    means = {
        name: {
            figure: geometric_mean(cell["ratios"][figure] for cell in cells if cell["lengths"] == name)
            for figure in ("ttft_s", "p95_ttft_s", "longest_s")
        }
        for name in sources
    }
    below = sum(cell["ratios"]["ttft_s"] < 0.97 for cell in cells)
    finish(
        "deadline-simulated",
        {
            "kind": "simulated",
            "batch": BATCH,
            "requests": REQUESTS,
            "geometric_means": means,
            "cells_below_0.97": below,
            "cells": cells,
        },
    )


if __name__ == "__main__":
    main(sys.argv[1:])
