"""MEDUSA's experiments that need a GPU: figures 3, 10 and 11, and table 1, with random weights of Llama shapes.

A rehearsal takes the same steps with a tiny model on vLLM's CPU build, which has no CUDA graphs.

Run: python -m benchmarks papers/medusa [NUMBER...] [--rehearse] [--shapes 1B,7b], or papers/medusa-NUMBER
Time: not timed on a GPU yet, rehearsed in some minutes
Result: papers/medusa-3.json and one for each other experiment; none of a rehearsal
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from pandas import Series

from benchmarks import llama
from benchmarks.common import run_coldstart
from benchmarks.gpu.plan import REHEARSAL, VLLM_ARGS
from benchmarks.papers import Experiment, Found, Rows, run
from benchmarks.papers.engine import arrive, sharegpt
from coldstart.graphs import prove, tables
from coldstart.lab.live import VOCABULARY, Target, replay
from coldstart.lab.plan import generate_prompt
from coldstart.lab.records import tabulate
from coldstart.lab.traces import TraceRequest
from coldstart.launch.completions import CompletionClient
from coldstart.models import inspection
from coldstart.system.devices import nvml
from coldstart.system.paths import Cache
from coldstart.validate import launchers
from coldstart.validate.launch import HOST, LaunchedServer, Launcher, run_server

VLLM, EAGER, OURS = "vLLM", "vLLM without CUDA graphs", "mode fresh with graphs in the bundle"
MODES = {VLLM: launchers.VLLM_WARM, EAGER: launchers.VLLM_EAGER}
PROMPT, OUTPUT = 161, 338
SPEEDUP, NODES = "up to 2.4x", {"7b": "12,518 (Llama2-7B)"}
# Requests per second, and the paper's reduction of P99 TTFT.
TRACES = {2.0: "50.5 % less (Llama2-7B)", 10.0: "53.0 % less (Llama2-7B)"}
THROUGHPUT = {1.0: "-", 3.0: "-", 4.5: "43.0 % less (Llama2-7B, 4.5 requests/s served)", 6.0: "-", 8.0: "-"}
ROUNDS, SECONDS, START_S = 3, 60.0, 600.0
# Default models, with twice the GiB of their weights.
SHAPES = {"1B": 4.1, "7b": 25.1}


class Model:
    """Checkpoint of random weights, and its servers. A rehearsal has short requests, one round and one rate."""

    def __init__(self, shape: str, work: Path, *, rehearse: bool) -> None:
        place = Cache.at().models / "bench-papers" / shape
        llama.build(shape, place)
        self.shape, self.work, self.rehearse = shape, work, rehearse
        self.rounds, self.seconds = (1, 2.0) if rehearse else (ROUNDS, SECONDS)
        vllm_args = tuple(REHEARSAL if rehearse else VLLM_ARGS)
        self.subject = launchers.ModelUnderTest(str(place), str(place), vllm_args)
        # vLLM captures each of these graphs as FULL, so that a bundle can restore all of them.
        self.with_graphs = replace(self.subject, vllm_args=(*vllm_args, "-cc", launchers.FULL_DECODE_ONLY))

    def limit(self, prompt: int, output: int) -> tuple[int, int]:
        """Return the tokens of a prompt and of its answer."""
        return (min(prompt, 64), min(output, 8)) if self.rehearse else (prompt, output)

    def materialize(self) -> Bundle:
        """Build the bundle with graphs. Raises CalledProcessError."""
        options = ("--graphs", "--format", "json", *self.with_graphs.separated_vllm_args)
        printed = run_coldstart("materialize", self.subject.model, *options)
        return Store(Cache.at().bundles).find_by_reference(json.loads(printed)["ref"])

    @contextmanager
    def serve(self, system: str) -> Iterator[tuple[LaunchedServer, CompletionClient]]:
        """Start a server, which has answered one request for a token when the block begins."""
        launcher: Launcher
        if system == OURS:
            launcher = launchers.ServeLauncher(self.with_graphs, launchers.FRESH, self.work / "run")
        else:
            launcher = launchers.VllmLauncher(self.subject, self.work / "vllm", MODES[system])
        with run_server(launcher, Path(tempfile.mkdtemp(dir=self.work)) / "start") as server:
            client = CompletionClient(HOST, server.files.port)
            client.await_first_token("a", deadline_s=time.monotonic() + START_S, check=server.check_alive)
            yield server, client

    def start_from_zero(self, system: str, rate: float, seed: int) -> dict[str, Any]:
        """Start a server at the first arrival of a trace; return the TTFT of its requests, and facts about the start."""
        sizes = [self.limit(*size) for size in sharegpt(max(2, round(rate * self.seconds)), seed)]
        arrivals = arrive(sizes, rate, seed=seed)
        with self.serve(system) as (server, _):
            start_s = time.monotonic() - server.launched_s
            began_s = arrivals[0][0] + start_s
            rows = [TraceRequest(at - began_s, prompt, output) for at, prompt, output in arrivals]
            done = replay(rows, Target(f"http://{HOST}:{server.files.port}", "m"), seed)
            fallbacks = server.read_readiness().get("fallbacks")
        frame = tabulate(done.records)
        assert frame["ok"].all(), frame["error"].dropna().tolist()
        served = len(frame) / (start_s + done.duration_s)
        print(f"{self.shape}, {rate:g} requests/s, {system}: started in {start_s:.1f} s", flush=True)
        ttft_s = frame["ttft_s"].tolist()
        return {"ttft_s": ttft_s, "start_s": start_s, "requests_per_s": served, "fallbacks": fallbacks}


def declare(measure: Callable[[Sequence[Model]], Found]) -> Experiment:
    """Return the experiment with its options: names of shapes, by default those that fit on the GPU, and a rehearsal."""

    def measure_shapes(shapes: str | None, rehearse: bool) -> Found:
        free_gib = sum(nvml.read_gpu_state().free_bytes[:1]) / 2**30
        fitting = [shape for shape, gib in SHAPES.items() if gib < free_gib]
        chosen = shapes.split(",") if shapes else ["tiny"] if rehearse else fitting
        if not chosen or set(chosen) - llama.SHAPES.keys():
            reason = f"there is no model {shapes}" if chosen else f"{free_gib:.1f} GiB of the GPU are free"
            hint = f"--shapes 1B, of {', '.join(llama.SHAPES)}"
            raise SystemExit(f"error: cannot choose models: {reason}\nhint: {hint}")
        with tempfile.TemporaryDirectory(prefix="medusa-") as work:
            return measure([Model(shape, Path(work), rehearse=rehearse) for shape in chosen])

    return Experiment(measure_shapes, "measured", needs_gpu=True)


def figure3(models: Sequence[Model]) -> Found:
    """Decode of one request at a time with CUDA graphs over --enforce-eager, both by stock vLLM."""
    rows, details = Rows(), {}
    for model in models:
        rates = {}
        prompt, output = model.limit(PROMPT, OUTPUT)
        tokens = generate_prompt(TraceRequest(0.0, prompt, output), 0, 0, VOCABULARY)
        for system in (VLLM, EAGER):
            with model.serve(system) as (_, client):
                times = [client.complete(tokens, output).seconds for _ in range(model.rounds + 1)][1:]
            rates[system] = output / median(times)
        shown = f"{rates[VLLM] / rates[EAGER]:.2f}x ({rates[VLLM]:.1f} over {rates[EAGER]:.1f} tokens/s)"
        what = f"decode with graphs over without, {model.shape}, {prompt} + {output} tokens"
        rows.append((what, SPEEDUP, shown))
        details[model.shape] = rates
    return rows, {"tokens_per_s": details}


def compare_starts(models: Sequence[Model], paper: dict[float, str]) -> Found:
    """P99 TTFT of traces whose first request starts the server, by rate and the paper's value there."""
    rows, details = Rows(), dict[str, Any]()
    for model in models:
        model.materialize()
        for system in (VLLM, EAGER):
            with model.serve(system):
                pass  # fills vLLM's caches, and the page cache
        for rate in [*paper][:1] if model.rehearse else paper:
            of = details[f"{model.shape}, {rate:g}"] = {name: [] for name in (VLLM, EAGER, OURS)}
            for number in range(model.rounds):
                for name in (*[*of][number:], *[*of][:number]):
                    of[name].append(model.start_from_zero(name, rate, number))
            ttft_s = {name: [s for one in runs for s in one["ttft_s"]] for name, runs in of.items()}
            p99 = {name: Series(seconds).quantile(0.99) for name, seconds in ttft_s.items()}
            for name, runs in of.items():
                what = f"P99 TTFT, {model.shape}, {rate:g} requests/s, {name}"
                served = fmean(one["requests_per_s"] for one in runs)
                less = 1 - p99[name] / p99[VLLM]
                shown = f"{p99[name]:.2f} s, {less:.1%} less; {served:.2f} requests/s served"
                if fallbacks := {one["section"] for run in runs for one in run["fallbacks"] or ()}:
                    shown += f"; fallbacks: {', '.join(sorted(fallbacks))}"
                rows.append((what, paper[rate] if name == OURS else "-", shown))
    return rows, details


def table1(models: Sequence[Model]) -> Found:
    """Nodes of the CUDA graphs in the bundle of each model."""
    rows, details = Rows(), dict[str, dict[int, int]]()
    for model in models:
        bundle, found = model.materialize(), dict[int, int]()
        shown = inspection.list_missing_sections(bundle).get("graphs", "")
        if bundle.has_section("graphs"):
            with prove.extract_graphs(bundle) as directory:
                section = tables.load(directory)
            for graph in sorted(section.graphs.values(), key=lambda graph: graph.size):
                found[graph.size] = len(graph.nodes)
            captured = len(section.refused)
            sizes = ", ".join(f"{size}: {count}" for size, count in found.items())
            shown = f"{sum(found.values()):,} in {len(found)} graphs ({sizes}); {captured} more are captured at each start"
        what = f"nodes of the graphs of {model.shape}, by batch size"
        rows.append((what, NODES.get(model.shape, "-"), shown))
        details[model.shape] = found
    return rows, {"nodes_by_batch_size": details}


EXPERIMENTS = {
    "3": declare(figure3),
    "10": declare(partial(compare_starts, paper=TRACES)),
    "11": declare(partial(compare_starts, paper=THROUGHPUT)),
    "table1": declare(table1),
}

if __name__ == "__main__":
    run("medusa", EXPERIMENTS, sys.argv[1:])
