"""Combine two captures into relocatable graphs, and relocate the graphs in a bundle to the addresses of a process.

A payload byte in a bundle is 0 if it is part of a relocation, 0xFF if it is noise, and the captured constant otherwise.
0xFF makes verification fail if a kernel reads noise. A relocated word is the region's address plus an offset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from coldstart.graphs.api import LAUNCH
from coldstart.graphs.classify import Classifier, Memory
from coldstart.graphs.errors import GraphError, format_reasons
from coldstart.graphs.record import Snapshot
from coldstart.graphs.tables import (
    ABSOLUTE,
    BLOCK,
    BYTES,
    RELOCATION,
    TENSOR_MAP_BYTES,
    Array,
    Graph,
    Kernel,
    SymbolRegion,
    Tables,
    find_word_offsets,
    values,
)

if TYPE_CHECKING:
    from coldstart.graphs.cuda.driver import CudaDriver

NOISE = 0xFF


def combine(a: Snapshot, b: Snapshot) -> Tables:
    """Combine two captures into relocatable tables. Their regions have the addresses of `b`.

    Raises:
        GraphRefusedError: A pointer has the same address in both captures.
        GraphError: No graph can be relocated.
    """
    reasons = find_disagreements(a.tables, b.tables)
    keys = [key for key in b.tables.graphs if key not in reasons]
    if not keys:
        raise GraphError(f"no graph can be relocated: {format_reasons(reasons)}")
    memory, kernels = Memory(a, b), b.tables.kernels
    pairs = {key: (a.tables.graphs[key], b.tables.graphs[key]) for key in keys}
    windows = {key: find_word_offsets(graph, kernels, 1) for key, (_, graph) in pairs.items()}
    memory.check_moved(
        (values(one.payload, windows[key]), values(other.payload, windows[key]))
        for key, (one, other) in pairs.items()
    )
    found = {
        key: Classifier(memory, one, other, (a.maps[key], b.maps[key])).run(
            find_word_offsets(other, kernels), windows[key]
        )
        for key, (one, other) in pairs.items()
    }
    conflicts = {
        key: _describe_conflict(memory, *pairs[key], kernels, int(c.conflict[0]))
        for key, c in found.items()
        if len(c.conflict)
    }
    graphs = {key: _apply(pairs[key][1], found[key]) for key in keys if key not in conflicts}
    tables = replace(b.tables, graphs=graphs, refused=reasons | conflicts)
    tables, used = _add_contents(tables, b, a.contents, memory)
    return _keep_regions(tables, used, memory.regions)


def find_disagreements(a: Tables, b: Tables) -> dict[str, str]:
    """Return, by graph key, the reason why a capture refused the graph, or the difference between the two captures."""
    reasons = {**a.refused, **b.refused}
    for key in {**a.graphs, **b.graphs}:
        if key in reasons:
            continue
        if key not in a.graphs or key not in b.graphs:
            reasons[key] = "only one of the two recording processes captured this graph"
        elif not _same_structure(a, a.graphs[key], b, b.graphs[key]):
            reasons[key] = "the kernels, launch sizes or edges differ between the two captures"
        elif missing := [k for k in b.graphs[key].kernels() if b.kernels[k].binary is None]:
            reasons[key] = f"kernel {b.kernels[missing[0]].name} cannot be restored: its binary is unknown"
    return reasons


def _same_structure(a: Tables, one: Graph, b: Tables, other: Graph) -> bool:
    mine, theirs = one.nodes, other.nodes
    if len(mine) != len(theirs) or not np.array_equal(one.edges, other.edges):
        return False
    same = all(np.array_equal(mine[n], theirs[n]) for n in ("kind", "grid", "block", "shared", "size"))
    launch = mine["kind"] == 0
    pairs = {(int(m["kernel"]), int(t["kernel"])) for m, t in zip(mine[launch], theirs[launch], strict=same)}
    return (
        same
        and all(_is_same_kernel(a.kernels[m], b.kernels[t]) for m, t in pairs)
        and [a.attributes[i] for i in mine["attributes"]] == [b.attributes[i] for i in theirs["attributes"]]
    )


def _is_same_kernel(one: Kernel, other: Kernel) -> bool:
    """Return whether two kernels are equal. If a binary is unknown, compare only the other fields."""
    known = one.binary is not None and other.binary is not None
    return one == other if known else replace(one, binary=None) == replace(other, binary=None)


def _describe_conflict(memory: Memory, one: Graph, other: Graph, kernels: list[Kernel], byte: int) -> str:
    """Describe a conflicting word in live memory by its kernel, parameter byte and addresses in both processes."""
    place = byte // 8 * 8  # payloads and pointers are 8-byte aligned
    node = other.nodes[int(np.searchsorted(other.nodes["payload"], place, side="right")) - 1]
    kernel = kernels[node["kernel"]].name if node["kind"] == 0 else "a memset or memcpy node"
    a, b = (int(values(g.payload, np.array([place]))[0]) for g in (one, other))
    return (
        f"{kernel}, parameter byte {place - int(node['payload'])}: the two captures contain pointers to "
        f"different places in live memory: {memory.describe(a, b)}"
    )


def _apply(graph: Graph, classified: Classifier) -> Graph:
    """Return the graph with its addresses replaced by relocations and its noise bytes replaced by NOISE."""
    rows, payload = classified.relocations, graph.payload.copy()
    # The address of a tensor map is at its start.
    payload[(rows["place"].astype(np.int64)[:, None] + np.arange(8)).ravel()] = 0
    payload[classified.noise] = NOISE
    return replace(graph, payload=payload, relocations=rows)


# --- contents ----------------------------------------------------------------------------------------


def _add_contents(
    tables: Tables, b: Snapshot, theirs: Mapping[int, bytes], memory: Memory
) -> tuple[Tables, set[int]]:
    """Add the contents of memory that outlives the capture and that graphs reach; `theirs` are those of the first process.

    Return the tables and the indices of all reachable regions.
    """
    used = {int(i) for g in tables.graphs.values() for i in np.unique(g.relocations["region"])}
    bases = np.array(sorted(b.contents), np.uint64)
    waiting = list(zip(bases.tolist(), *(c.tolist() for c in memory.locate(bases)), strict=True))
    moved, start = memory.pair_contents(), 0
    blocks, data, rows = list[tuple[int, ...]](), list[Array](), list[Array]()
    while reached := [row for row in waiting if row[1] in used]:
        waiting = [row for row in waiting if row[1] not in used]
        for base, region, offset in reached:
            body, pointers = _link_content(theirs.get(moved.get(base, 0)), b.contents[base], memory)
            pointers["place"] += start
            used |= set(np.unique(pointers["region"]).tolist())
            blocks.append((region, len(body), offset, start))
            data.append(body)
            rows.append(pointers)
            start += len(body)
    changed = replace(
        tables, blocks=np.array(blocks, BLOCK), contents=np.concatenate([np.zeros(0, BYTES), *data]),
        content_relocations=np.concatenate([np.zeros(0, RELOCATION), *rows]),
    )  # fmt: skip
    return changed, used


def _link_content(one: bytes | None, other: bytes, memory: Memory) -> tuple[Array, Array]:
    """Return the contents with addresses zeroed, and relocations for the aligned words that moved alike in both processes."""
    body, whole = np.frombuffer(other, np.uint8).copy(), len(other) // 8 * 8
    if one is None or len(one) != len(other):
        return body, np.zeros(0, RELOCATION)
    a, b = np.frombuffer(one, np.uint8)[:whole].view("<u8"), body[:whole].view("<u8").copy()
    at = np.flatnonzero(a != b)
    at = at[memory.explain(a[at], b[at])[0]]
    rows = np.zeros(len(at), RELOCATION)
    rows["place"] = at * 8
    rows["region"], rows["offset"] = memory.locate(b[at])
    body[:whole].view("<u8")[at] = 0
    return body, rows


def _keep_regions(tables: Tables, used: set[int], regions: list[SymbolRegion]) -> Tables:
    """Return the tables with only the used regions, renumbered."""
    number = np.zeros(len(regions) + 1, np.int64)
    number[sorted(used)] = np.arange(len(used))

    def renumber(rows: Array) -> Array:
        rows = rows.copy()
        rows["region"] = number[rows["region"]]
        return rows

    graphs = {key: replace(g, relocations=renumber(g.relocations)) for key, g in tables.graphs.items()}
    return replace(
        tables, graphs=graphs, regions=[regions[i] for i in sorted(used)], blocks=renumber(tables.blocks),
        content_relocations=renumber(tables.content_relocations),
    )  # fmt: skip


# --- in a process ------------------------------------------------------------------------------------


def relocate(payload: Array, relocations: Array, base: Array, driver: CudaDriver) -> Array:
    """Return a copy of the payload with all relocations applied. `base` has the address of each region in this process."""
    out = np.array(payload)
    plain = relocations[relocations["kind"] == ABSOLUTE]
    addresses = base[plain["region"]] + plain["offset"].astype(np.uint64)
    out[plain["place"].astype(np.int64)[:, None] + np.arange(8)] = addresses.view(np.uint8).reshape(-1, 8)
    for place, region, _, _, offset in relocations[relocations["kind"] != ABSOLUTE].tolist():
        descriptor = out[place : place + TENSOR_MAP_BYTES].tobytes()
        moved = driver.move_tensor_map(descriptor, int(base[region]) + offset)
        out[place : place + TENSOR_MAP_BYTES] = np.frombuffer(moved, np.uint8)
    return out


def make_launches(
    graph: Graph, payload: Array, kernels: Sequence[Kernel], functions: Sequence[int]
) -> tuple[Array, Array]:
    """Return a row of CUDA_KERNEL_NODE_PARAMS for each node (zeros unless it is a kernel), and the kernelParams arrays.

    The rows point into these arrays, which point into `payload`; keep both alive as long as the rows are used.
    """
    nodes, address = graph.nodes, payload.ctypes.data + graph.nodes["payload"].astype(np.uint64)
    launched = np.flatnonzero(nodes["kind"] == 0)
    number = nodes["kernel"][launched]
    counts = np.array([len(kernel.layout) for kernel in kernels] or [0])
    start = np.concatenate([[0], np.cumsum(counts[number])]) if len(launched) else np.zeros(1, np.int64)
    pointers = np.zeros(int(start[-1]) + 1, np.uint64)
    for k in np.unique(number).tolist():
        offsets, mine = np.array([at for at, _ in kernels[k].layout], np.uint64), np.flatnonzero(number == k)
        pointers[start[mine][:, None] + np.arange(len(offsets))] = address[launched[mine]][:, None] + offsets
    rows = np.zeros(len(nodes), LAUNCH)
    rows["function"][launched] = np.array([*functions, 0], np.uint64)[number]
    for name in ("grid", "block", "shared"):
        rows[name][launched] = nodes[name][launched]
    rows["params"][launched] = pointers.ctypes.data + 8 * start[:-1].astype(np.uint64)
    return rows, pointers
