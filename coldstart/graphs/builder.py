"""Append graphs to tables, and select a subset of the graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from coldstart.graphs.api import Edge, KernelNode, NodeKind
from coldstart.graphs.tables import (
    ARRAYS,
    EDGE,
    GRAPH,
    NO_KERNEL,
    NODE,
    Array,
    Attributes,
    Kernel,
    Tables,
    empty_tables,
)

ALIGN = 16


class Builder:
    """Collector of rows in Python lists; `tables()` converts them to arrays once."""

    def __init__(self) -> None:
        self._graphs: list[tuple[int, ...]] = []
        self._nodes: list[tuple[object, ...]] = []
        self._edges: list[tuple[int, ...]] = []
        self._payload = bytearray()
        self._keys: list[str] = []
        self._kernels: dict[Kernel, int] = {}
        self._attributes: dict[Attributes, int] = {(): 0}
        self.refused: dict[str, str] = {}

    def begin(self, key: str, size: int) -> None:
        """Start a graph; a graph that is never finished leaves no rows."""
        self._open = (key, size, len(self._nodes), len(self._edges), len(self._payload))

    def abandon(self, reason: str) -> None:
        """Drop the current graph and record the reason."""
        key, _, nodes, edges, payload = self._open
        del self._nodes[nodes:], self._edges[edges:], self._payload[payload:]
        self.refused[key] = reason

    def kernel(self, node: KernelNode, kernel: Kernel) -> None:
        """Append a kernel launch."""
        number = self._kernels.setdefault(kernel, len(self._kernels))
        attributes = self._attributes.setdefault(node.attributes, len(self._attributes))
        row = (NodeKind.KERNEL, 0, attributes, number, node.grid, node.block, len(node.payload), node.shared)
        self._nodes.append((*row, self._store(node.payload)))

    def other(self, kind: NodeKind, payload: bytes = b"") -> None:
        """Append a memset, copy or empty node."""
        row = (kind, 0, 0, NO_KERNEL, (0, 0, 0), (0, 0, 0), len(payload), 0)
        self._nodes.append((*row, self._store(payload)))

    def _store(self, payload: bytes) -> int:
        at = len(self._payload)
        self._payload += payload.ljust(-(-len(payload) // ALIGN) * ALIGN, b"\0")
        return at

    def finish(self, handles: Sequence[int], edges: Iterable[Edge]) -> None:
        """Close the graph; `handles` are its nodes in the order in which they were appended."""
        key, size, node, edge, _ = self._open
        number = {handle: i for i, handle in enumerate(handles)}
        rows = [(number[e.source], number[e.target], e.from_port, e.to_port, e.type, 0) for e in edges]
        self._edges += sorted(rows)
        self._graphs.append((size, node, len(self._nodes) - node, edge, len(rows), 0, 0, 0))
        self._keys.append(key)

    def tables(self) -> Tables:
        """Return the tables of all graphs so far, without regions and relocations."""
        return replace(
            empty_tables(),
            graphs=np.array(self._graphs, GRAPH), nodes=np.array(self._nodes, NODE),
            edges=np.array(self._edges, EDGE), payload=np.frombuffer(bytes(self._payload), np.uint8),
            keys=self._keys, kernels=list(self._kernels), attributes=list(self._attributes),
            refused=dict(self.refused),
        )  # fmt: skip


def subset(tables: Tables, keep: Callable[[str], bool], reasons: dict[str, str] | None = None) -> Tables:
    """Return the graphs whose key satisfies `keep`; `reasons` are added to the refused graphs."""
    names = ("graphs", "nodes", "edges", "relocations", "payload", "assumed")
    parts: dict[str, list[Array]] = {n: [] for n in names}
    for index in (i for i, key in enumerate(tables.keys) if keep(key)):
        for name, rows in _cut(tables, index, {n: sum(map(len, p)) for n, p in parts.items()}).items():
            parts[name].append(rows)
    arrays = {n: np.concatenate([np.zeros(0, ARRAYS[n]), *rows]) for n, rows in parts.items()}
    keys = [key for key in tables.keys if keep(key)]
    return replace(tables, **arrays, keys=keys, refused={**tables.refused, **(reasons or {})})


def drop_unused_regions(tables: Tables) -> Tables:
    """Drop the symbols that no relocation, content block or assumption names, and renumber the others."""
    rows = (tables.relocations, tables.content_relocations, tables.blocks)
    named = [r["region"].astype(np.int64) for r in rows]
    named += [tables.assumed[n].astype(np.int64) for n in ("end_of", "start_of")]
    used = np.unique(np.concatenate(named))
    assumed = tables.assumed.copy()
    for end in ("end_of", "start_of"):
        assumed[end] = np.searchsorted(used, assumed[end])
    relocations, contents, blocks = (r.copy() for r in rows)
    for mine in (relocations, contents, blocks):
        mine["region"] = np.searchsorted(used, mine["region"])
    regions = [tables.regions[i] for i in used.tolist()]
    return replace(
        tables,
        regions=regions,
        relocations=relocations,
        content_relocations=contents,
        blocks=blocks,
        assumed=assumed,
    )


def _cut(tables: Tables, index: int, at: dict[str, int]) -> dict[str, Array]:
    """Return the rows of one graph, renumbered for tables that already have the lengths `at`."""
    nodes, edges, relocations = (rows.copy() for rows in tables.graph(index))
    start = int(nodes["payload"].min()) if len(nodes) else 0
    last = nodes[np.argmax(nodes["payload"].astype(np.int64) + nodes["size"])] if len(nodes) else None
    end = start if last is None else -(-(int(last["payload"]) + int(last["size"])) // ALIGN) * ALIGN
    nodes["payload"] = nodes["payload"].astype(np.int64) + at["payload"] - start
    relocations["place"] = relocations["place"].astype(np.int64) + at["payload"] - start
    graph = np.zeros(1, GRAPH)
    graph[0] = (
        tables.graphs[index]["size"], at["nodes"], len(nodes), at["edges"], len(edges),
        at["relocations"], len(relocations), 0,
    )  # fmt: skip
    payload = np.array(tables.payload[start:end])
    assumed = tables.assumed[tables.assumed["graph"] == index].copy()
    assumed["graph"] = at["graphs"]
    return {
        "graphs": graph, "nodes": nodes, "edges": edges, "relocations": relocations, "payload": payload,
        "assumed": assumed,
    }  # fmt: skip
