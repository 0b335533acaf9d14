"""Deadlines against first come, first served, on vLLM's own scheduler with a virtual clock. Simulated.

The model is the roofline of OPT-13B (`papers/engine.py`), whose KV memory holds about 24,000 tokens here. Arrivals are Poisson.
A ratio is FCFS over deadline, so above 1 is a gain; `longest` is the mean latency of the tenth of requests with the longest
outputs.

Run: python -m benchmarks scheduling/deadline
Time: about 4 minutes
Result: deadline-simulated.json
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice, product
from math import log
from random import Random
from statistics import fmean, geometric_mean
from typing import Any

from benchmarks.common import finish
from benchmarks.papers.engine import BANDWIDTH, OPT_13B, capacity
from benchmarks.papers.lengths import LONGEST
from benchmarks.traces import azure_conversation
from coldstart.lab.engine import EngineSimulator
from coldstart.lab.plan import rearrive
from coldstart.lab.traces import TraceRequest
from coldstart.scheduling import SchedulerSettings
from coldstart.vllm.scheduling.virtual_engine import EngineResources

BATCH, REQUESTS, BLOCKS, BLOCK = 32, 150, 1536, 16
LOADS, SEEDS = (0.5, 0.7, 0.9, 1.1), (1, 2)


def azure(count: int) -> list[TraceRequest]:
    """Return rows of the Azure conversation trace (2023) whose context fits OPT's positions."""
    rows = (row for row in azure_conversation() if row.prompt_tokens + row.output_tokens <= LONGEST)
    return list(islice(rows, count))


def skewed(count: int) -> list[TraceRequest]:
    """Return log-normal lengths with a long tail (sigma 1.4), clipped."""
    random = Random(5)

    def draw(median: float) -> int:
        return max(1, min(LONGEST // 2, round(random.lognormvariate(log(median), 1.4))))

    return [TraceRequest(0.0, draw(100), draw(60)) for _ in range(count)]


def simulate(rows: list[TraceRequest], settings: SchedulerSettings) -> EngineSimulator:
    """Replay on vLLM's scheduler; there are more slots than requests, because the batch is bounded."""
    token = OPT_13B.kv_bytes_per_token
    machine = EngineResources(
        slots=4096, block_tokens=BLOCK, device_blocks=BLOCKS, block_bytes=token * BLOCK, context_s=token / BANDWIDTH, depth=1
    )  # fmt: skip
    simulator = EngineSimulator(OPT_13B.profile(), settings, machine)
    simulator.run(rows)
    return simulator


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
    arrivals = list(
        rearrive(
            rows, load * capacity(OPT_13B, [(r.prompt_tokens, r.output_tokens) for r in rows], BATCH), 1, seed
        )
    )
    own = SchedulerSettings(batch=BATCH)
    measured = {
        policy: figures_of(simulate(arrivals, replace(own, policy=policy))) for policy in ("fcfs", "deadline")
    }
    ratios = {name: measured["fcfs"][name] / measured["deadline"][name] for name in measured["fcfs"]}
    return {"load": load, "seed": seed, **measured, "ratios": ratios}


def main() -> None:
    sources: dict[str, Callable[[int], list[TraceRequest]]] = {"azure": azure, "log-normal": skewed}
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
    main()
