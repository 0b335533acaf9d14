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
from benchmarks.papers import Experiment, Found, Rows, medusa_gpu, run

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


CPU = "tiny-llama, vLLM on two CPU cores"
NO_GRAPHS = "The CPU has no CUDA graphs and no memory profiling by a forward pass; compilation and warm-up take their place"
LLAMAS = "Llama shapes with random weights"
FROM_ZERO = "requests of a minute with ShareGPT's lengths, of which the first starts the server"
OTHER_GPU = "Another GPU, vLLM 0.32 and random weights; the starts here import their packages, which the paper keeps warm."
EXPERIMENTS = {
    "1": Experiment("loading phase in a cold start", CPU, "one start of vLLM with warm caches", "vLLM 0.32 imports for longer"
                    " than the paper's, on slow cores, and there are no graphs to capture.", kind="measured", measure=figure1),
    "2": Experiment("stages of the loading phase", CPU, "one start of vLLM with warm caches", f"{NO_GRAPHS}.", kind="measured",
                    measure=figure2),
    "3": Experiment("decode with CUDA graphs over without", f"stock vLLM, {LLAMAS}, one request at a time",
                    "with and without --enforce-eager", OTHER_GPU, measure=medusa_gpu.prepare(medusa_gpu.figure3),
                    kind="measured", needs_gpu=True, paper="up to 2.4 times as fast"),
    "7": Experiment("cold start", CPU, "vLLM and three modes", f"{NO_GRAPHS}; coldstart also skips most imports.",
                    kind="measured", measure=figure7),
    "8": Experiment("stages of vLLM and of a start from a bundle", CPU, "two modes", f"{NO_GRAPHS}.", kind="measured",
                    measure=figure8),
    "9": Experiment("offline phase", "random Llamas of 16M to 1B parameters, vLLM on two CPU cores", "sizes", "Two slow cores"
                    " compile the model, and a real start proves the bundle before it is published; no graph is analysed.",
                    kind="measured", measure=figure9),
    "10": Experiment("P99 TTFT with traces", f"{LLAMAS}; {FROM_ZERO}", "2 and 10 requests/s, three starts each", OTHER_GPU,
                     measure=medusa_gpu.prepare(medusa_gpu.figure10), kind="measured", needs_gpu=True,
                     paper="50.5 % and 53.0 % less"),
    "11": Experiment("P99 TTFT by throughput", f"{LLAMAS}; {FROM_ZERO}", "1 to 8 requests/s, three starts each", OTHER_GPU,
                     measure=medusa_gpu.prepare(medusa_gpu.figure11), kind="measured", needs_gpu=True,
                     paper="43.0 % less at 4.5 requests/s"),
    "table1": Experiment("nodes of the CUDA graphs", f"graphs in the bundle of {LLAMAS}", "batch sizes", OTHER_GPU,
                         measure=medusa_gpu.prepare(medusa_gpu.table1), kind="measured", needs_gpu=True,
                         paper="9,118 to 19,318 for each of ten models"),
}  # fmt: skip

if __name__ == "__main__":
    run("medusa", EXPERIMENTS, sys.argv[1:])
