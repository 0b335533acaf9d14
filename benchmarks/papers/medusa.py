"""MEDUSA's experiments from the stages that `coldstart bench` and `materialize` report; some need a GPU.

The stages are those of the latest run of start/cold_start and start/model_sizes: run these first to measure anew.

Run: python -m benchmarks papers/medusa [NUMBER...], or papers/medusa-NUMBER
Time: seconds, after start/cold_start (40 minutes) and start/model_sizes
Result: papers/medusa-7.json and one for each other experiment that needs no GPU
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.common import load
from benchmarks.papers import Experiment, Rows, run

VLLM, OURS = "vllm-warm", "fresh"
Found = tuple[Rows, Mapping[str, Any]]
Measure = Callable[[], Found]


def _median(mode: Mapping[str, Any]) -> float:
    return float(mode["first_token_s"]["median"])


def measured(rows: Callable[[Mapping[str, Any], Mapping[str, float], Mapping[str, float]], Rows]) -> Measure:
    """Return a measurement of start modes; `rows` gets all modes, and the median stages of vLLM and of ours."""

    def measure() -> Found:
        found = load("cold-start-cpu")
        source = {key: found[key] for key in ("date", "model", "vllm_args", "versions")}
        modes: Mapping[str, Any] = found["modes"]
        theirs, ours = ({n: of["median"] for n, of in modes[mode]["phases"].items()} for mode in (VLLM, OURS))
        return rows(modes, theirs, ours), {"from": "cold-start-cpu.json", **source}

    return measure


@measured
def figure1(modes: Mapping[str, Any], theirs: Mapping[str, float], ours: Mapping[str, float]) -> Rows:
    """Loading phase in the cold start of vLLM."""
    whole, loading = _median(modes[VLLM]), ("load weights", "torch.compile", "init engine without compiling")
    engine = sum(theirs.get(name, 0.0) for name in loading)
    shown = f"{100 * engine / whole:.0f} % of {whole:.1f} s; the rest are imports and processes"
    return [("loading phase in the cold start of vLLM", "76 % (runtime 22 %, first token 2 %)", shown)]


@measured
def figure2(modes: Mapping[str, Any], theirs: Mapping[str, float], ours: Mapping[str, float]) -> Rows:
    """Stages of the loading phase of vLLM."""
    kept = {name: s for name, s in theirs.items() if name not in ("until listening", "first request")}
    paper = "KV cache initialization and capture are 47 % on average of ten models"
    return [("stages of vLLM's loading phase", paper, ", ".join(f"{n} {s:.2f} s" for n, s in kept.items()))]


@measured
def figure7(modes: Mapping[str, Any], theirs: Mapping[str, float], ours: Mapping[str, float]) -> Rows:
    """Reduction of the cold start."""
    base, papers = (
        _median(modes[VLLM]),
        {OURS: "34.9 % on average", "template-runtime": "-", "template-engine": "-"},
    )
    times = {mode: _median(modes[mode]) for mode in papers}
    return [(f"cold start less than vLLM, mode {mode}", papers[mode], f"{1 - s / base:.1%} ({base:.1f} to {s:.2f} s)")
            for mode, s in times.items()]  # fmt: skip


@measured
def figure8(modes: Mapping[str, Any], theirs: Mapping[str, float], ours: Mapping[str, float]) -> Rows:
    """Stages of one start, vLLM and from a bundle."""
    return [
        ("KV cache initialization and capture, or warm-up", "0.50 + 0.90 s to 0.02 + 0.57 s",
         f"{theirs['init engine without compiling']:.2f} s (init engine) to"
         f" {ours['warm up'] + ours['restore compiled forward']:.2f} s"),
        ("model weights", "0.39 s, beside other stages", f"{theirs['load weights']:.2f} s to {ours['load']:.2f} s"),
    ]  # fmt: skip


def figure9() -> Found:
    """Seconds of the offline phase."""
    made = {size: one["materialize"] for size, one in load("model-sizes-cpu")["rows"].items()}
    paper = "39.2 s on average, below a minute"
    rows = [
        (f"offline phase, {size}", paper, f"{sum(of['stages'].values()):.0f} s") for size, of in made.items()
    ]
    return rows, {"from": "model-sizes-cpu.json", "stages": made}


CPU = "tiny-llama, vLLM on two CPU cores"
NO_GRAPHS = "The CPU has no CUDA graphs and no memory profiling by a forward pass; compilation and warm-up take their place"
EXPERIMENTS = {
    "1": Experiment("loading phase in a cold start", CPU, "one start of vLLM with warm caches", "vLLM 0.32 imports for longer"
                    " than the paper's, on slow cores, and there are no graphs to capture.", kind="measured", measure=figure1),
    "2": Experiment("stages of the loading phase", CPU, "one start of vLLM with warm caches", f"{NO_GRAPHS}.", kind="measured",
                    measure=figure2),
    "3": Experiment("decode with CUDA graphs over without", "four models", "", "", paper="up to 2.4 times as fast"),
    "7": Experiment("cold start", CPU, "vLLM and three modes", f"{NO_GRAPHS}; coldstart also skips most imports.",
                    kind="measured", measure=figure7),
    "8": Experiment("stages of vLLM and of a start from a bundle", CPU, "two modes", f"{NO_GRAPHS}.", kind="measured",
                    measure=figure8),
    "9": Experiment("offline phase", "random Llamas of 16M to 1B parameters, vLLM on two CPU cores", "sizes", "Two slow cores"
                    " compile the model, and a real start proves the bundle before it is published; no graph is analysed.",
                    kind="measured", measure=figure9),
    "10": Experiment("P99 TTFT with traces", "Llama2-7B, Qwen1.5-4B", "request rate", "", paper="50.5 % and 53.0 % less"),
    "11": Experiment("P99 TTFT by throughput", "Llama2-7B", "request rate", "", paper="43.0 % less at 4.5 requests/s"),
    "table1": Experiment("nodes of the CUDA graphs of ten models", "35 batch sizes", "", "", paper="for each model"),
}  # fmt: skip

if __name__ == "__main__":
    run("medusa", EXPERIMENTS, sys.argv[1:])
