"""Python's share of a restore: the same table built through the backend, and the driver's calls alone.

share = (time of Restorer.graph over all graphs - time of the fake driver's own functions) / nodes
All times are CPU time of the thread, so that other work on the machine does not count; the fake's own share
is a C loop over the same rows and edges.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from support.fake_cuda.model import LAYOUTS, NAMED, POOL, FakeModel

from coldstart.graphs import table_files
from coldstart.graphs.api import LAUNCH
from coldstart.graphs.link import launch_rows, relocate
from coldstart.graphs.restore import Restorer
from coldstart.graphs.tables import EDGE, GRAPH, NODE, RELOCATION, Kernel, SymbolRegion, Tables, empty_tables

GRAPHS, PER_GRAPH = 35, 400
POINTERS = 4
PAYLOAD = 48


class Many(FakeModel):
    """A framework with 35 graphs; only their keys matter."""

    def sizes(self) -> dict[str, int]:
        return {f"decode:{i}": i for i in range(1, GRAPHS + 1)}


def tables(digest: str) -> Tables:
    """14,000 kernel nodes in 35 chains, four relocations each."""
    count = GRAPHS * PER_GRAPH
    nodes, edges = np.zeros(count, NODE), np.zeros(GRAPHS * (PER_GRAPH - 1), EDGE)
    nodes["grid"], nodes["block"], nodes["size"] = 1, 32, 32
    nodes["payload"] = np.arange(count) * PAYLOAD // 16 * 16
    chain = np.arange(PER_GRAPH - 1)
    edges["source"], edges["target"] = np.tile(chain, GRAPHS), np.tile(chain + 1, GRAPHS)
    rows = np.zeros(count * POINTERS, RELOCATION)
    rows["place"] = (nodes["payload"][:, None] + np.arange(POINTERS) * 8).ravel()
    rows["offset"] = np.arange(len(rows)) % 16 * 16
    rows["region"] = np.arange(len(rows)) % len(NAMED)
    graphs = np.zeros(GRAPHS, GRAPH)
    for name, size in (("node", PER_GRAPH), ("edge", PER_GRAPH - 1), ("relocation", PER_GRAPH * POINTERS)):
        graphs[name], graphs[name + "s"] = np.arange(GRAPHS) * size, size
    return replace(
        empty_tables(), graphs=graphs, nodes=nodes, edges=edges, relocations=rows,
        payload=np.zeros(count * PAYLOAD, np.uint8), keys=[f"decode:{i}" for i in range(1, GRAPHS + 1)],
        kernels=[Kernel("k_add", digest, LAYOUTS["k_add"])],
        regions=[SymbolRegion(symbol, size) for symbol, size in NAMED.items()],
    )  # fmt: skip


def measure(rounds: int, spread: Callable[[list[float]], dict[str, float]]) -> dict[str, Any]:
    """All figures; microseconds a node, milliseconds otherwise."""
    model = Many(1)
    (digest,) = model.driver.modules.images
    with tempfile.TemporaryDirectory() as directory:
        bundle = Path(directory) / "bundle"
        table_files.save(tables(digest), bundle, model.driver.modules.images)
        count = GRAPHS * PER_GRAPH
        read = [_timed(lambda: table_files.load(bundle)) for _ in range(rounds)]
        restores, drivers, relocations, rows = [], [], [], []
        loaded = table_files.load(bundle)
        for _ in range(rounds):
            relocations.append(_timed(lambda: _relocate(loaded)))
            rows.append(_timed(lambda: launch_rows(loaded, np.array(loaded.payload), [1])))
            restorer = Restorer(bundle, model.driver, model)
            restorer.link()
            restores.append(_timed(lambda r=restorer: [r.graph(key) for key in model.sizes()]))
            drivers.append(_driver_alone(restorer, loaded))
            if restorer.fallbacks:
                raise RuntimeError(restorer.fallbacks)
    share = [1e6 * (whole - alone) / count for whole, alone in zip(restores, drivers, strict=True)]
    return {
        "nodes": count, "pointers": count * POINTERS, "pool_bytes": POOL,
        "restore_us_a_node_without_driver": spread(share),
        "restore_us_a_node_with_fake_driver": spread([1e6 * t / count for t in restores]),
        "relocation_ms": spread([1e3 * t for t in relocations]),
        "launch_rows_ms": spread([1e3 * t for t in rows]),
        "read_verified_ms": spread([1e3 * t for t in read]),
        "bytes_per_node": loaded.bytes_per_node(),
    }  # fmt: skip


def _timed(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def _relocate(loaded: Tables) -> object:
    base = np.arange(1, len(loaded.regions) + 1, dtype=np.uint64) << np.uint64(32)
    return relocate(loaded.payload, loaded.relocations, base)


def _driver_alone(restorer: Restorer, loaded: Tables) -> float:
    """The fake's own share: its functions in one tight C loop over the same rows and edges."""
    fake = ctypes.CDLL("libcuda.so.1")
    linked = restorer._linked
    if linked is None:
        raise RuntimeError("not linked")
    total = ctypes.c_double()
    edges = np.ascontiguousarray(loaded.edges[: PER_GRAPH - 1])
    for number in range(GRAPHS):
        rows: Sequence[Any] = linked.rows.rows[number * PER_GRAPH : (number + 1) * PER_GRAPH]
        held = np.ascontiguousarray(rows)
        spent = fake.fake_time_build
        spent.restype = ctypes.c_double
        arguments = (
            held.ctypes.data,
            len(held),
            LAUNCH.itemsize,
            edges.ctypes.data,
            len(edges),
            EDGE.itemsize,
        )
        total.value += spent(*(ctypes.c_size_t(a) for a in arguments))
    return total.value
