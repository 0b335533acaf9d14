"""MEDUSA's experiments from the stages that `coldstart bench` and `materialize` report; 3, 10, 11 and table 1 need a GPU.

The stages are those of the latest run of start/cold_start and start/model_sizes: run these first to measure anew.

Run: python -m benchmarks papers/medusa [NUMBER...] [--rehearse] [--shapes 1B,7b], or papers/medusa-NUMBER
Time: seconds, after start/cold_start (40 minutes) and start/model_sizes; on a GPU not timed yet, rehearsed in some minutes
Result: papers/medusa-7.json and one for each other experiment; none of a rehearsal
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.common import load
from benchmarks.papers import Experiment, Found, Rows, declare, run
from benchmarks.papers import medusa_gpu as gpu

VLLM, OURS = "vllm-warm", "fresh"


def load_modes() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the medians of each start mode, its stages among them, and where they come from."""
    found = load("cold-start-cpu")
    medians = {
        mode: {name: stage["median"] for name, stage in row["phases"].items()}
        | {"first token": row["first_token_s"]["median"]}
        for mode, row in found["modes"].items()
    }
    source = {key: found[key] for key in ("date", "model", "vllm_args", "versions")}
    return medians, {"from": "cold-start-cpu.json", **source}


def figure1() -> Found:
    """Loading phase in the cold start of vLLM."""
    modes, source = load_modes()
    vllm, stages = modes[VLLM], ("load weights", "torch.compile", "init engine without compiling")
    share, whole = sum(vllm.get(name, 0.0) for name in stages) / vllm["first token"], vllm["first token"]
    shown = f"{100 * share:.0f} % of {whole:.1f} s; the rest are imports and processes"
    paper = "76 % (runtime 22 %, first token 2 %)"
    return [("loading phase in the cold start of vLLM", paper, shown)], source


def figure2() -> Found:
    """Stages of the loading phase of vLLM."""
    modes, source = load_modes()
    others = ("until listening", "first request", "first token")
    shown = ", ".join(f"{name} {s:.2f} s" for name, s in modes[VLLM].items() if name not in others)
    paper = "KV cache initialization and capture are 47 % on average of ten models"
    return [("stages of vLLM's loading phase", paper, shown)], source


def figure7() -> Found:
    """Reduction of the cold start."""
    modes, source = load_modes()
    base, rows = modes[VLLM]["first token"], Rows()
    for mode, paper in ((OURS, "34.9 % on average"), ("template-runtime", "-"), ("template-engine", "-")):
        ours = modes[mode]["first token"]
        shown = f"{1 - ours / base:.1%} ({base:.1f} to {ours:.2f} s)"
        rows.append((f"cold start less than vLLM, mode {mode}", paper, shown))
    return rows, source


def figure8() -> Found:
    """Stages of one start, vLLM and from a bundle."""
    modes, source = load_modes()
    theirs, ours = modes[VLLM], modes[OURS]
    after = ours["warm up"] + ours["restore compiled forward"]
    capture = f"{theirs['init engine without compiling']:.2f} s (init engine) to {after:.2f} s"
    weights = f"{theirs['load weights']:.2f} s to {ours['load']:.2f} s"
    return [
        ("KV cache initialization and capture, or warm-up", "0.50 + 0.90 s to 0.02 + 0.57 s", capture),
        ("model weights", "0.39 s, beside other stages", weights),
    ], source


def figure9() -> Found:
    """Seconds of the offline phase."""
    built = {size: row["materialize"] for size, row in load("model-sizes-cpu")["rows"].items()}
    paper = "39.2 s on average, below a minute"
    rows = [
        (f"offline phase, {size}", paper, f"{sum(one['stages'].values()):.0f} s")
        for size, one in built.items()
    ]
    return rows, {"from": "model-sizes-cpu.json", "stages": built}


CPU = declare(figure1, figure2, figure7, figure8, figure9, kind="measured")
EXPERIMENTS = CPU | {
    "3": Experiment(gpu.prepare(gpu.figure3), "measured", needs_gpu=True),
    "10": Experiment(gpu.prepare(gpu.figure10), "measured", needs_gpu=True),
    "11": Experiment(gpu.prepare(gpu.figure11), "measured", needs_gpu=True),
    "table1": Experiment(gpu.prepare(gpu.table1), "measured", needs_gpu=True),
}

if __name__ == "__main__":
    run("medusa", EXPERIMENTS, sys.argv[1:])
