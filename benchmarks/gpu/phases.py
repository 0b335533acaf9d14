"""The phases of the GPU check. Each runs in a process of its own and returns one JSON-ready dictionary."""

from __future__ import annotations

import hashlib
import platform
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from workloads import CASES, Llama, Shape, Workload

from coldstart.graphs import capture, compare, contents, gate, materialize, store
from coldstart.graphs import inspect as inspection
from coldstart.graphs.api import Captured
from coldstart.graphs.cuda.backend import CudaDriver
from coldstart.graphs.cuda.calls import bindings, call
from coldstart.graphs.cuda.cupti import Watch
from coldstart.graphs.cuda.modules import ModuleLog
from coldstart.graphs.errors import BaseCollision, GraphError
from coldstart.graphs.restore import Restorer
from coldstart.graphs.snapshot import load_snapshot
from coldstart.graphs.torch_framework import TorchFramework, consumes_random

SEED = 17


class Process:
    """A workload, a driver and a framework; capturing ones watch modules and record memory history."""

    def __init__(self, case: str, seed: int, layers: int, *, watch: bool = False) -> None:
        self.log, self.times, self.notes = ModuleLog(), dict[str, float](), dict[str, str]()
        torch.cuda.init()
        if watch:
            torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=2_000_000)
            try:
                self.watch = Watch(self.log)
            except GraphError as error:
                self.notes["cupti"] = str(error)
        with self.timed("weights_s"):
            self.work: Any = make(case, seed, layers)
        self.driver: Any = CudaDriver(self.log)
        self.framework: Any = TorchFramework(
            self.driver, self.work.tensors(), self.work.keys(), self.work.capture, self.work.pool
        )

    def timed(self, name: str) -> Timer:
        return Timer(self, name)

    def order(self) -> list[str]:
        """Largest first, as engines do."""
        return sorted(self.work.keys(), key=lambda key: -self.work.keys()[key])

    def capture_all(self) -> tuple[dict[str, Any], dict[str, Captured]]:
        """(kept CUDAGraphs, captures instantiated by the driver)."""
        with self.timed("warm_up_s"):
            for key in self.order():
                self.work.eager(key)
                self.driver.synchronize()
        with self.timed("capture_s"):
            graphs = {key: self.work.capture(key) for key in self.order()}
        with self.timed("instantiate_s"):
            captured = {key: self.instantiate(graph) for key, graph in graphs.items()}
        return graphs, captured

    def instantiate(self, graph: Any) -> Captured:
        raw = int(graph.raw_cuda_graph())
        return Captured(raw, self.driver.instantiate(raw), [graph])

    def hashes(self, runs: dict[str, Callable[[], object]]) -> dict[str, str]:
        """Of outputs and KV cache after each run on the seeded input."""
        return {key: hashlib.sha256(self.observe(key, run)).hexdigest()[:16] for key, run in runs.items()}

    def observe(self, key: str, run: Callable[[], object]) -> bytes:
        self.work.prepare(key, SEED)
        run()
        self.driver.synchronize()
        data: bytes = self.work.observe(key)
        return data

    def free_memory(self) -> int:
        return int(torch.cuda.mem_get_info()[0])

    def latency(self, run: Callable[[], object], rounds: int = 30) -> float:
        """Median microseconds of one replay."""
        samples = []
        for _ in range(rounds + 5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            samples.append(1e3 * start.elapsed_time(end))
        return statistics.median(samples[5:])

    def consumes_random(self, graph: Any) -> bool:
        return consumes_random(graph)

    def resize_a_region(self) -> None:
        """Make a named region another size, as another engine configuration would."""
        tensors = self.framework.tensors
        name = next(n for n in tensors if n.startswith("static:"))
        self.framework.tensors = {**tensors, name: torch.empty(3, device="cuda")}


class Timer:
    """Wall-clock seconds between two synchronisations."""

    def __init__(self, process: Process, name: str) -> None:
        self._process, self._name = process, name

    def _now(self) -> float:
        driver = getattr(self._process, "driver", None)
        if driver is not None:
            driver.synchronize()
        return time.perf_counter()

    def __enter__(self) -> None:
        self._start = self._now()

    def __exit__(self, *_: object) -> None:
        self._process.times[self._name] = self._now() - self._start


def make(case: str, seed: int, layers: int) -> Workload:
    """A workload by name; llama and matmul are the two attention paths."""
    if case in ("llama", "matmul"):
        return Llama(seed, Shape(layers=layers), "matmul" if case == "matmul" else "sdpa")
    return CASES[case](seed)


def three(keys: list[str]) -> list[str]:
    """Smallest, middle and largest."""
    return [keys[-1], keys[len(keys) // 2], keys[0]]


# --- P0 ---


def probe(case: str, where: Path, seed: int, layers: int) -> dict[str, Any]:
    """Versions; CUPTI; parameters and attributes of captured nodes; raw-graph edits; tensor-map bytes."""
    del case, where, layers
    process = Process("streams", seed, 1, watch=True)
    graph = process.work.capture("decode:8")
    raw, d = int(graph.raw_cuda_graph()), process.driver
    kernels = [d.kernel_node(n) for n in d.nodes(raw) if d.kind(n) == 0]
    found = [d.kernel(k.function) for k in kernels]
    masks = _try(lambda: capture.bit_masks(d, bytes(128)))
    return {
        "machine": machine(),
        "cupti": process.notes.get("cupti", "ok"),
        "modules_seen": len(process.log.images), "modules_unreadable": process.log.unreadable,
        "kernels": [{"name": k.name, "parameters": len(k.layout), "binary": k.binary} for k in found],
        "node_attributes": sorted({a for k in kernels for a, _ in k.attributes}),
        "edges_with_data": sum(e.type != 0 for e in d.edges(raw)),
        "raw_graph_edit": _try(lambda: (d.add_empty(raw), d.instantiate(raw)) and "ok"),
        "tensor_map_bits": masks if isinstance(masks, str) else sum(m != 0 for m in masks),
        "pool_segments": [r.size for r in process.framework.pool()],
    }  # fmt: skip


def _try(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - a probe reports whatever happens
        return f"{type(error).__name__}: {error}"


def _driver_version() -> int:
    return int(call(bindings().cuDriverGetVersion))


def machine() -> dict[str, Any]:
    """Facts about where this ran."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1),
        "torch": torch.__version__,
        "cuda": torch.version.cuda, "capability": f"{properties.major}.{properties.minor}",
        "driver": _driver_version(),
        "cuda_bindings": metadata.version("cuda-bindings"), "python": platform.python_version(),
    }  # fmt: skip


# --- P1: the ordinary way ---


def ordinary(case: str, where: Path, seed: int, layers: int) -> dict[str, Any]:
    """Warm-up, capture, instantiate; node counts; hashes; replay latency."""
    del where
    process = Process(case, seed, layers)
    graphs, captured = process.capture_all()
    nodes = {key: len(process.driver.nodes(c.graph)) for key, c in captured.items()}
    return {
        "times": process.times, "nodes": sum(nodes.values()),
        "nodes_a_graph": [min(nodes.values()), max(nodes.values())],
        "hashes": process.hashes({key: graph.replay for key, graph in graphs.items()}),
        "latency_us": {key: process.latency(graphs[key].replay) for key in three(process.order())},
    }  # fmt: skip


# --- P2, P3: two layouts and the bundle ---


def snapshot(case: str, where: Path, seed: int, layers: int) -> dict[str, Any]:
    """Capture and save everything another process needs to compare."""
    process = Process(case, seed, layers, watch=True)
    taken = _taken(process)[0]
    taken.save(where / f"{case}-{seed}")
    return {"times": process.times, "notes": process.notes, "refused": taken.tables.refused}


def _taken(process: Process) -> tuple[Any, dict[str, Captured]]:
    graphs, captured = process.capture_all()
    for key, graph in graphs.items():
        if process.consumes_random(graph):
            process.framework.refusals[key] = "the graph consumes random numbers"
    with process.timed("read_s"):
        taken = capture.take(process.driver, process.framework, captured)
    return taken, captured


def bundle(case: str, where: Path, seed: int, layers: int) -> dict[str, Any]:
    """Compare with the snapshots of seeds 1 and 2; save all contents first, then only the needed ones."""
    process = Process(case, seed, layers, watch=True)
    taken, captured = _taken(process)
    if not taken.tables.keys:
        return {"times": process.times, "refused": taken.tables.refused}
    first, third = (load_snapshot(where / f"{case}-{s}") for s in (1, 2))
    with process.timed("classify_s"):
        combined = materialize.combine(first, taken, [third])
    store.save(combined.tables, where / f"{case}-full", taken.binaries)
    keys = combined.tables.keys
    scores = [asdict(s) for s in compare.compare(first.keep(keys), taken.keep(keys))]
    unknown = sorted({k.name for k in combined.tables.kernels if k.binary is None})
    result = {
        "times": process.times,
        "classifiers": scores,
        "kernels_without_binary": unknown,
        "notes": process.notes,
    }
    with process.timed("poison_s"):
        small = contents.minimise(process.driver, process.work, captured, combined, taken.contents)
    store.save(small, where / f"{case}-bundle", taken.binaries)
    return result | {"bundle": inspection.summary(where / f"{case}-bundle") | {"kernels": len(small.kernels)}}


def _bundle_of(case: str, where: Path) -> Path:
    small = where / f"{case}-bundle"
    return small if (small / store.MANIFEST).exists() else where / f"{case}-full"


# --- P4: restore ---


def restore(case: str, where: Path, seed: int, layers: int) -> dict[str, Any]:
    """No forward before: link, build all; then eager, captured and restored outputs and latencies."""
    process = Process(case, seed, layers)
    directory, free = _bundle_of(case, where), process.free_memory()
    restorer = Restorer(directory, process.driver, process.framework)
    with process.timed("link_s"):
        linked = restorer.link()
    keys = process.order()
    with process.timed("first_two_s"):
        restored = {key: restorer.graph(key) for key in (keys[-1], keys[0])} if linked else {}
    with process.timed("rest_s"):
        restored |= {key: restorer.graph(key) for key in keys} if linked else {}
    used = free - process.free_memory()
    hashes = process.hashes({key: graph.replay for key, graph in restored.items()})
    own = {key: process.work.capture(key) for key in keys}
    captured = process.hashes({key: graph.replay for key, graph in own.items()})
    eager = process.hashes({key: lambda k=key: process.work.eager(k) for key in keys})
    return {
        "times": process.times, "memory_bytes": used, "fallbacks": restorer.fallbacks,
        "rungs": restorer.ladder.rungs if linked else {},
        "restored": sum(g.restored for g in restored.values()), "hashes": hashes,
        "equal_captured": sum(hashes.get(k) == captured[k] for k in keys),
        "equal_eager": sum(hashes.get(k) == eager[k] for k in keys), "graphs": len(keys),
        "latency_us": {
            k: {"restored": process.latency(restored[k].replay), "captured": process.latency(own[k].replay)}
            for k in three(keys) if k in restored
        },
    }  # fmt: skip


def prove(case: str, where: Path, seed: int, layers: int) -> dict[str, Any]:
    """The publish gate itself."""
    process = Process(case, seed, layers)
    directory = _bundle_of(case, where)
    restorer = Restorer(directory, process.driver, process.framework)
    proof = gate.prove(restorer, process.driver, process.framework, process.work)
    gate.publish(proof, directory)
    return {"proven": len(proof.proven), "failed": proof.failed, "canary": proof.canary}


# --- P5: negatives ---


def shifted(case: str, where: Path, seed: int, layers: int) -> dict[str, Any]:
    """A relocation moved by 256 bytes must not pass the gate."""
    source, naive = _bundle_of(case, where), where / f"{case}-shifted"
    tables = store.load(source)
    rows = tables.relocations.copy()
    wanted = [i for i, r in enumerate(tables.regions) if r.symbol.startswith("param:") and r.size > 256]
    rows["offset"][np.flatnonzero(np.isin(rows["region"], wanted) & (rows["offset"] == 0))[0]] += 256
    binaries = {d: store.load_binary(source, d) for d in {k.binary for k in tables.kernels if k.binary}}
    store.save(replace(tables, relocations=rows), naive, binaries)
    process = Process(case, seed, layers)
    restorer = Restorer(naive, process.driver, process.framework)
    proof = gate.prove(restorer, process.driver, process.framework, process.work, seeds=(1,))
    return {"caught": bool(proof.failed), "failed": proof.failed}


def missing(case: str, where: Path, seed: int, layers: int) -> dict[str, Any]:
    """Without a binary, with another region size, and with one layout twice: capture, capture, refusal."""
    source, copy = _bundle_of(case, where), where / f"{case}-missing"
    shutil.copytree(source, copy)
    next((copy / "kernels").iterdir()).unlink()
    process = Process(case, seed, layers)
    restorer = Restorer(copy, process.driver, process.framework)
    restorer.link()
    graphs = [restorer.graph(key) for key in process.order()[:3]]
    process.resize_a_region()
    other = Restorer(source, process.driver, process.framework)
    same = load_snapshot(where / f"{case}-1")
    try:
        materialize.combine(same, same)
        collision = False
    except BaseCollision:
        collision = True
    return {
        "working_graphs_without_a_binary": len(graphs), "captured": sum(not g.restored for g in graphs),
        "reasons": restorer.fallbacks, "other_size_links": other.link(), "collision_refused": collision,
    }  # fmt: skip
