"""Summary of the `graphs` section of a bundle for `inspect`, and the difference between two; nothing is executed."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from coldstart.artifacts.bundle import Bundle, anyone
from coldstart.artifacts.errors import BundleError
from coldstart.graphs.api import NodeKind
from coldstart.graphs.errors import GraphError, NotProvenError
from coldstart.graphs.link import NOISE
from coldstart.graphs.prove import read_proof
from coldstart.graphs.tables import NO_KERNEL, PARTS, TENSOR_MAP, Array, Graph, Tables, load


@contextmanager
def extract(bundle: Bundle) -> Iterator[Path]:
    """Extract the section into a temporary directory, which is deleted on exit. Raises BundleError."""
    with tempfile.TemporaryDirectory(prefix="coldstart-inspect-") as place:
        # The section is read and never loaded, so its source need not be trusted.
        bundle.extract("graphs", Path(place) / "graphs", trust=anyone)
        yield Path(place) / "graphs"


def summarize(bundle: Bundle) -> dict[str, object] | None:
    """Return counts of nodes, kernels, relocations and refused graphs, and bytes; None if the bundle has no section.

    The result has an "error" if the section cannot be read.
    """
    if not bundle.has("graphs"):
        return None
    try:
        with extract(bundle) as directory:
            return summarize_directory(directory)
    except (BundleError, GraphError) as error:
        return {"error": str(error)}


def compare(left: Bundle, right: Bundle) -> dict[str, object] | None:
    """Return the differences between the CUDA graphs of two bundles; None if a section is missing or both are equal.

    Raises BundleError, GraphError.
    """
    if not (left.has("graphs") and right.has("graphs")):
        return None
    if left.entry("graphs").digest == right.entry("graphs").digest:
        return None
    with extract(left) as one, extract(right) as other:
        return compare_directories(one, other)


def summarize_directory(directory: Path) -> dict[str, Any]:
    """Return counts and bytes of a bundle on disk as JSON data. Raises AlteredTableError."""
    tables = load(directory)
    graphs, count = list(tables.graphs.values()), max(1, sum(len(g.nodes) for g in tables.graphs.values()))
    edges, rows = (_join(graphs, name) for name in ("edges", "relocations"))
    nodes = _join(graphs, "nodes")
    uses = Counter(nodes["kernel"][nodes["kind"] == NodeKind.KERNEL].tolist())
    kinds = Counter(NodeKind(int(kind)).name.lower() for kind in nodes["kind"])
    parts = (getattr(g, name).nbytes for g in graphs for name in ("nodes", "edges", "relocations", "payload"))
    return {
        "graphs": len(graphs),
        "sizes": {key: graph.size for key, graph in tables.graphs.items()},
        "nodes": len(nodes),
        "nodes_by_kind": dict(sorted(kinds.items())),
        "edges": len(edges),
        "edges_with_data": int(((edges["type"] != 0) | (edges["from_port"] != 0)).sum()),
        "kernels": [
            {"name": k.name, "binary": k.binary, "uses": uses[i]} for i, k in enumerate(tables.kernels)
        ],
        "relocations": len(rows),
        "relocations_by_region": count_relocations(tables, rows),
        "relocations_of_tensor_maps": int((rows["kind"] == TENSOR_MAP).sum()),
        "unstable_bytes": tables.report.get("noise_bytes", 0),
        "refused": tables.refused,
        "contents_bytes": int(tables.contents.nbytes),
        "bytes_per_node": round(sum(parts) / count, 1),
        "bytes_on_disk": sum(p.stat().st_size for p in directory.rglob("*") if p.is_file()),
        "proof": _describe_proof(directory),
    }


def _join(graphs: Sequence[Graph], name: str) -> Array:
    return np.concatenate([np.zeros(0, PARTS[name]), *(getattr(graph, name) for graph in graphs)])


def count_relocations(tables: Tables, rows: Array) -> dict[str, int]:
    """Return the number of relocations for each type of symbol: param, buffer, kv, static, pool, lib, alloc."""
    kinds = [region.symbol.partition(":")[0] for region in tables.regions]
    return dict(sorted(Counter(kinds[i] for i in rows["region"].tolist()).items()))


def _describe_proof(directory: Path) -> dict[str, Any] | None:
    try:
        proof = read_proof(directory)
    except NotProvenError:
        return None
    return {"graphs": len(proof.proven), "seeds": proof.seeds, "eager": proof.eager}


def compare_directories(one: Path, other: Path) -> dict[str, Any]:
    """Return the differences of two bundles: graphs, kernels, regions, refused graphs, and rows of common graphs."""
    a, b = load(one), load(other)
    names = [{f"{k.name} {k.binary}" for k in t.kernels} for t in (a, b)]
    symbols = [{f"{r.symbol} {r.size}" for r in t.regions} for t in (a, b)]
    both = [key for key in a.graphs if key in b.graphs]
    return {
        "graphs_only": _only({*a.graphs}, {*b.graphs}),
        "kernels_only": _only(*names),
        "regions_only": _only(*symbols),
        "refused_only": _only({*a.refused}, {*b.refused}),
        "graphs_changed": {key: counts for key in both if (counts := count_changes(a, b, key))},
    }


def _only(one: set[str], other: set[str]) -> list[list[str]]:
    return [sorted(one - other), sorted(other - one)]


def count_changes(a: Tables, b: Tables, key: str) -> dict[str, int]:
    """Return how many rows of a graph differ, by table; {} if none. Surplus rows count as different."""
    one, other = a.graphs[key], b.graphs[key]
    counts = {
        "nodes": _count_different(_node_rows(a, one), _node_rows(b, other)),
        "edges": _count_different(one.edges.tolist(), other.edges.tolist()),
        "relocations": _count_different(_relocation_rows(a, one), _relocation_rows(b, other)),
        "parameter_bytes": _count_different_bytes(one.payload, other.payload),
    }
    return {name: count for name, count in counts.items() if count}


def _count_different(one: Sequence[object], other: Sequence[object]) -> int:
    return sum(x != y for x, y in zip_longest(one, other))


def _node_rows(tables: Tables, graph: Graph) -> list[object]:
    """Return rows that are comparable between bundles: kernels and attributes instead of their numbers."""
    columns = graph.nodes[["kind", "grid", "block", "shared", "size"]].tolist()
    kernels = [tables.kernels[k] if k != NO_KERNEL else None for k in graph.nodes["kernel"].tolist()]
    attributes = [tables.attributes[i] for i in graph.nodes["attributes"].tolist()]
    return [(str(row), *rest) for row, *rest in zip(columns, kernels, attributes, strict=True)]


def _relocation_rows(tables: Tables, graph: Graph) -> list[object]:
    """Return rows of (byte in the payload, symbol, kind, offset)."""
    rows = graph.relocations.tolist()
    return [(place, tables.regions[region].symbol, kind, offset) for place, region, kind, _, offset in rows]


def _count_different_bytes(one: Array, other: Array) -> int:
    if len(one) != len(other):
        return abs(len(one) - len(other))
    return int(((one != other) & (one != NOISE) & (other != NOISE)).sum())
