"""What `inspect` shows of a graphs section, and the difference between two of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from coldstart.graphs.api import NodeKind
from coldstart.graphs.errors import NotProven
from coldstart.graphs.gate import read_proof
from coldstart.graphs.materialize import NOISE
from coldstart.graphs.store import load
from coldstart.graphs.table import Tables


def summary(directory: Path) -> dict[str, Any]:
    """Counts and bytes of a bundle on disk; JSON-ready. Raises AlteredTable."""
    tables = load(directory)
    return {
        "graphs": len(tables.keys),
        "nodes": len(tables.nodes),
        "nodes_by_kind": _kinds(tables),
        "edges": len(tables.edges),
        "edges_with_data": int(((tables.edges["type"] != 0) | (tables.edges["from_port"] != 0)).sum()),
        "kernels": _kernels(tables),
        "relocations": len(tables.relocations),
        "relocations_by_region": by_region(tables),
        "unstable_bytes": tables.report.get("noise_bytes", 0),
        "refused": tables.refused,
        "contents_bytes": int(tables.contents.nbytes),
        "bytes_per_node": round(tables.bytes_per_node(), 1),
        "bytes_on_disk": sum(p.stat().st_size for p in directory.rglob("*") if p.is_file()),
        "proven": _proven(directory),
    }


def _kinds(tables: Tables) -> dict[str, int]:
    kinds, counts = np.unique(tables.nodes["kind"], return_counts=True)
    return {NodeKind(int(k)).name.lower(): int(n) for k, n in zip(kinds, counts, strict=True)}


def _kernels(tables: Tables) -> list[dict[str, Any]]:
    uses = Counter(tables.nodes["kernel"][tables.nodes["kind"] == 0].tolist())
    return [
        {"name": k.name, "binary": k.binary, "library": k.library, "uses": uses[i]}
        for i, k in enumerate(tables.kernels)
    ]


def by_region(tables: Tables) -> dict[str, int]:
    """Relocations by kind of symbol: param, buffer, kv, static, pool, lib, alloc."""
    kinds = [region.symbol.replace("#", ":").partition(":")[0] for region in tables.regions]
    counts = Counter(kinds[i] for i in tables.relocations["region"].tolist())
    return dict(sorted(counts.items()))


def _proven(directory: Path) -> bool:
    try:
        read_proof(directory)
    except NotProven:
        return False
    return True


def diff(one: Path, other: Path) -> dict[str, Any]:
    """What two bundles do not share: graphs, kernels, regions, and graphs whose rows differ."""
    a, b = load(one), load(other)
    names = [{(k.name, k.binary) for k in t.kernels} for t in (a, b)]
    symbols = [{(r.symbol, r.size) for r in t.regions} for t in (a, b)]
    return {
        "graphs_only": [sorted(set(a.keys) - set(b.keys)), sorted(set(b.keys) - set(a.keys))],
        "kernels_only": [sorted(names[0] - names[1], key=str), sorted(names[1] - names[0], key=str)],
        "regions_only": [sorted(symbols[0] - symbols[1]), sorted(symbols[1] - symbols[0])],
        "graphs_changed": [key for key in a.keys if key in b.keys and not same_graph(a, b, key)],
    }


def same_graph(a: Tables, b: Tables, key: str) -> bool:
    """Whether a graph has equal nodes, edges and relocated parameters in both."""
    (n, e, r), (m, f, s) = a.graph(a.keys.index(key)), b.graph(b.keys.index(key))
    if len(n) != len(m) or len(r) != len(s) or not np.array_equal(e, f):
        return False
    if any(not np.array_equal(n[c], m[c]) for c in ("kind", "grid", "block", "shared", "size")):
        return False
    names = zip(n["kernel"][n["kind"] == 0].tolist(), m["kernel"][m["kind"] == 0].tolist(), strict=True)
    if any(a.kernels[i] != b.kernels[j] for i, j in names):
        return False
    targets = zip(r.tolist(), s.tolist(), strict=True)
    if any(a.regions[x[1]].symbol != b.regions[y[1]].symbol or x[2:] != y[2:] for x, y in targets):
        return False
    one, other = _payload(a, n), _payload(b, m)
    noise = (one == NOISE) | (other == NOISE)
    return bool((noise | (one == other)).all())


def _payload(tables: Tables, nodes: Any) -> Any:
    """Parameter bytes of a graph; noise is filled in, so it says nothing about equality."""
    spans = nodes[["payload", "size"]].tolist()
    return np.concatenate([np.zeros(0, np.uint8), *(tables.payload[p : p + s] for p, s in spans)])
