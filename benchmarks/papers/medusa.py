"""MEDUSA's experiments from the times that `coldstart bench` and `materialize` report; 3, 10, 11 and table 1 need a GPU.

The times are those of the latest run of start/cold_start and start/model_sizes: run these first to measure anew. The stages of
a start are a table of `coldstart bench`.

Run: python -m benchmarks papers/medusa [NUMBER...] [--rehearse] [--shapes 1B,7b], or papers/medusa-NUMBER
Time: seconds, after start/cold_start (40 minutes) and start/model_sizes; on a GPU not timed yet, rehearsed in some minutes
Result: papers/medusa-7.json and one for each other experiment; none of a rehearsal
"""

from __future__ import annotations

import sys

from benchmarks.common import load
from benchmarks.papers import Experiment, Found, Rows, declare, run
from benchmarks.papers import medusa_gpu as gpu


def figure7() -> Found:
    """Reduction of the cold start."""
    found, rows = load("cold-start-cpu"), Rows()
    first = {mode: row["first_token_s"]["median"] for mode, row in found["modes"].items()}
    base, paper = first["vllm-warm"], "34.9 % on average"
    for mode in ("fresh", "template-runtime", "template-engine"):
        shown = f"{1 - first[mode] / base:.1%} ({base:.1f} to {first[mode]:.2f} s)"
        rows.append((f"cold start less than vLLM, mode {mode}", paper if mode == "fresh" else "-", shown))
    source = {key: found[key] for key in ("date", "model", "vllm_args", "versions")}
    return rows, {"from": "cold-start-cpu.json", **source}


def figure9() -> Found:
    """Seconds of the offline phase."""
    built = {size: row["materialize"] for size, row in load("model-sizes-cpu")["rows"].items()}
    paper = "39.2 s on average, below a minute"
    rows = [
        (f"offline phase, {size}", paper, f"{sum(one['stages'].values()):.0f} s")
        for size, one in built.items()
    ]
    return rows, {"from": "model-sizes-cpu.json", "stages": built}


CPU = declare(figure7, figure9, kind="measured")
EXPERIMENTS = CPU | {
    "3": Experiment(gpu.prepare(gpu.figure3), "measured", needs_gpu=True),
    "10": Experiment(gpu.prepare(gpu.figure10), "measured", needs_gpu=True),
    "11": Experiment(gpu.prepare(gpu.figure11), "measured", needs_gpu=True),
    "table1": Experiment(gpu.prepare(gpu.table1), "measured", needs_gpu=True),
}

if __name__ == "__main__":
    run("medusa", EXPERIMENTS, sys.argv[1:])
