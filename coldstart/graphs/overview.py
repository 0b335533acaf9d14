"""Summary of the `graphs` section of a bundle for `inspect`; nothing is executed."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from coldstart.artifacts.bundle import Bundle, anyone
from coldstart.artifacts.errors import BundleError
from coldstart.graphs.api import NodeKind
from coldstart.graphs.errors import GraphError, NotProvenError
from coldstart.graphs.prove import read_proof
from coldstart.graphs.tables import PARTS, TENSOR_MAP, Array, Graph, Tables, load


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
    # The section is untrusted and can have any numbers.
    except (BundleError, GraphError, IndexError, ValueError) as error:
        return {"error": str(error)}


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
    return {"graphs": len(proof.proven), "seeds": proof.seeds}
