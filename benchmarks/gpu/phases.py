"""Phases of the GPU check. Each runs in a separate process and returns one dictionary for JSON."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import compare
from benchmarks.gpu import driver_probes as probes
from benchmarks.gpu.answers import ask, tell
from benchmarks.gpu.process import Process, three
from coldstart.graphs import capture, combine, contents, gate, table_files
from coldstart.graphs import overview as inspection
from coldstart.graphs.api import Captured
from coldstart.graphs.errors import BaseCollisionError, GraphError
from coldstart.graphs.restore import Restorer
from coldstart.graphs.snapshot import load_snapshot

REPLAYS = 400  # of the poison search: about a minute over some hundred MiB of contents

# --- P0 ---


def probe(case: str, where: Path, seed: int, layers: int) -> dict[str, Any]:
    """Versions; CUPTI; parameters and attributes of captured nodes; raw-graph edits. What may crash comes last."""
    del where, layers
    ask("versions", probes.versions)
    process = Process(case, seed, 1, watch=True)
    tell("cupti", process.notes.get("cupti", "ok"))
    ask("machine", probes.machine)
    process.work.eager("decode:8")  # no capture allows cuBLAS to create its handle, which the first call does
    torch.cuda.synchronize()
    graph = process.work.capture("decode:8")
    raw, d = int(graph.raw_cuda_graph()), process.driver
    kernels = [d.kernel_node(n) for n in d.nodes(raw) if d.kind(n) == 0]
    found = [d.kernel(k.function) for k in kernels]
    tell("modules", {"seen": len(process.log.images), "unreadable": process.log.unreadable})
    tell("kernels", [{"name": k.name, "parameters": len(k.layout), "binary": k.binary} for k in found])
    tell("node_attributes", sorted({a for k in kernels for a, _ in k.attributes}))
    ask("edges_with_data", lambda: sum(e.type != 0 for e in d.edges(raw)))
    ask("pool_segments", lambda: [r.size for r in process.framework.pool()])
    ask("kept_class", probes.capture_retained_graph)
    ask("edges_rebuilt", lambda: probes.programmatic_edges(d, kernels))
    ask("raw_graph_edit", lambda: (d.add_empty(raw), d.instantiate(raw)) and "ok")
    return {}


def probe_map(case: str, where: Path, seed: int, layers: int) -> dict[str, Any]:
    """Report the bytes of a tensor map in a separate process, because the driver has crashed on maps before."""
    del where, layers
    process = Process(case, seed, 1)
    tensor = torch.zeros((64, 64), dtype=torch.float16, device="cuda")
    return probes.tensor_map(process.driver, tensor.data_ptr())


# --- P1: ordinary captures ---


def ordinary(case: str, where: Path, seed: int, layers: int) -> dict[str, Any]:
    """Warm-up, capture, instantiate; node counts; hashes; replay latency."""
    del where
    process = Process(case, seed, layers)
    graphs, captured = process.capture_all()
    tell("times", process.times)
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
        combined = combine.combine(first, taken, [third])
    table_files.save(combined.tables, where / f"{case}-full", taken.binaries)
    keys = combined.tables.keys
    tell("classifiers", [asdict(s) for s in compare.compare(first.keep(keys), taken.keep(keys))])
    tell("kernels_without_binary", sorted({k.name for k in combined.tables.kernels if k.binary is None}))
    tell("full", inspection.summary(where / f"{case}-full"))
    result = {"times": process.times, "notes": process.notes, "refused": combined.tables.refused}
    try:
        with process.timed("poison_s"):
            small = contents.minimise(
                process.driver, process.work, captured, combined, taken.contents, budget=REPLAYS
            )
    except GraphError as error:  # the bundle with all contents remains for the next phases
        return result | {"poison": str(error)}
    table_files.save(small, where / f"{case}-bundle", taken.binaries)
    return result | {"bundle": inspection.summary(where / f"{case}-bundle") | {"kernels": len(small.kernels)}}


def _bundle_of(case: str, where: Path) -> Path:
    small = where / f"{case}-bundle"
    return small if (small / table_files.MANIFEST).exists() else where / f"{case}-full"


# --- P4: restore ---


def restore(case: str, where: Path, seed: int, layers: int) -> dict[str, Any]:
    """Link, build and run all restored graphs before any forward; then eager, and only then captured outputs.

    A capture before the first eager run fails: cuBLAS creates its handle, and Inductor compiles, at that run.
    """
    process = Process(case, seed, layers)
    directory, free = _bundle_of(case, where), process.free_memory()
    restorer = Restorer(directory, process.driver, process.framework, adopt=True, settled=None)
    with process.timed("link_s"):
        linked = restorer.link()
    keys = process.order()
    with process.timed("first_two_s"):
        built = {key: restorer.graph_or_none(key) for key in (keys[-1], keys[0])}
    with process.timed("rest_s"):
        built |= {key: restorer.graph_or_none(key) for key in keys}
    restored = {key: graph for key in keys if (graph := built[key]) is not None}
    used = free - process.free_memory()
    tell("built", {"times": process.times, "restored": len(restored), "fallbacks": restorer.fallbacks})
    hashes = process.hashes({key: graph.replay for key, graph in restored.items()})
    tell("hashes", hashes)
    eager = process.hashes({key: partial(process.work.eager, key) for key in keys})
    tell("equal_eager", sum(hashes.get(k) == eager[k] for k in keys))
    own = {key: process.work.capture(key) for key in keys}
    captured = process.hashes({key: graph.replay for key, graph in own.items()})
    return {
        "times": process.times, "memory_bytes": used, "fallbacks": restorer.fallbacks,
        "rungs": restorer.ladder.rungs if linked else {},
        "restored": len(restored), "hashes": hashes,
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
    restorer = Restorer(directory, process.driver, process.framework, adopt=True, settled=None)
    proof = gate.prove(restorer, process.driver, process.framework, process.work)
    tell("proof", {"proven": proof.proven, "failed": proof.failed, "unsettled": proof.unsettled})
    gate.publish(proof, directory)
    return {"proven": len(proof.proven), "failed": proof.failed, "canary": proof.canary}


# --- P5: negatives ---


def shifted(case: str, where: Path, seed: int, layers: int) -> dict[str, Any]:
    """A relocation moved by 256 bytes must not pass the gate."""
    source, naive = _bundle_of(case, where), where / f"{case}-shifted"
    tables = table_files.load(source)
    rows = tables.relocations.copy()
    wanted = [i for i, r in enumerate(tables.regions) if r.symbol.startswith("param:") and r.size > 256]
    rows["offset"][np.flatnonzero(np.isin(rows["region"], wanted) & (rows["offset"] == 0))[0]] += 256
    binaries = {d: table_files.load_binary(source, d) for d in {k.binary for k in tables.kernels if k.binary}}
    table_files.save(replace(tables, relocations=rows), naive, binaries)
    process = Process(case, seed, layers)
    restorer = Restorer(naive, process.driver, process.framework, adopt=True, settled=None)
    proof = gate.prove(restorer, process.driver, process.framework, process.work, seeds=(1,))
    return {"caught": bool(proof.failed), "failed": proof.failed}


def missing(case: str, where: Path, seed: int, layers: int) -> dict[str, Any]:
    """Without a binary, with another region size, and with one layout twice: capture, capture, refusal."""
    source, copy = _bundle_of(case, where), where / f"{case}-missing"
    shutil.copytree(source, copy, dirs_exist_ok=True)
    bundled = sorted((copy / "kernels").iterdir())
    for binary in bundled[:1]:
        binary.unlink()
    process = Process(case, seed, layers)
    restorer = Restorer(copy, process.driver, process.framework, adopt=True, settled=None)
    restorer.link()
    keys = process.order()[:3]
    for key in keys:
        process.work.eager(key)
    graphs = [restorer.graph(key) for key in keys]
    process.resize_a_region()
    other = Restorer(source, process.driver, process.framework, adopt=True, settled=None)
    same = load_snapshot(where / f"{case}-1")
    try:
        combine.combine(same, same)
        collision = False
    except BaseCollisionError:
        collision = True
    return {
        "working_graphs_without_a_binary": len(graphs), "captured": sum(not g.restored for g in graphs),
        "reasons": restorer.fallbacks, "binaries": len(bundled),
        "rungs": restorer.ladder.rungs, "other_size_links": other.link(), "collision_refused": collision,
    }  # fmt: skip
