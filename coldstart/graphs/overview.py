"""Summary of a graphs section for `inspect`, and the difference between two sections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from coldstart.graphs.api import NodeKind
from coldstart.graphs.combine import NOISE
from coldstart.graphs.errors import NotProvenError
from coldstart.graphs.gate import read_proof
from coldstart.graphs.table_files import load
from coldstart.graphs.tables import NO_KERNEL, TENSOR_MAP, Array, Kernel, Tables


def summary(directory: Path) -> dict[str, Any]:
    """Return counts and bytes of a bundle on disk as JSON data. Raises AlteredTableError."""
    tables = load(directory)
    return {
        "graphs": len(tables.keys),
        "sizes": dict(zip(tables.keys, tables.graphs["size"].tolist(), strict=True)),
        "nodes": len(tables.nodes),
        "nodes_by_kind": _kinds(tables),
        "edges": len(tables.edges),
        "edges_with_data": int(((tables.edges["type"] != 0) | (tables.edges["from_port"] != 0)).sum()),
        "kernels": [_kernel(directory, k, uses) for k, uses in _uses(tables)],
        "relocations": len(tables.relocations),
        "relocations_by_region": count_relocations(tables),
        "relocations_of_tensor_maps": int((tables.relocations["kind"] == TENSOR_MAP).sum()),
        "unstable_bytes": tables.report.get("noise_bytes", 0),
        "refused": tables.refused,
        "contents_bytes": int(tables.contents.nbytes),
        "bytes_per_node": round(tables.bytes_per_node(), 1),
        "bytes_on_disk": sum(p.stat().st_size for p in directory.rglob("*") if p.is_file()),
        "proof": _proof(directory),
    }


def _kinds(tables: Tables) -> dict[str, int]:
    kinds, counts = np.unique(tables.nodes["kind"], return_counts=True)
    return {NodeKind(int(k)).name.lower(): int(n) for k, n in zip(kinds, counts, strict=True)}


def _uses(tables: Tables) -> list[tuple[Kernel, int]]:
    uses = Counter(tables.nodes["kernel"][tables.nodes["kind"] == NodeKind.KERNEL].tolist())
    return [(kernel, uses[i]) for i, kernel in enumerate(tables.kernels)]


def _kernel(directory: Path, kernel: Kernel, uses: int) -> dict[str, Any]:
    """Return a kernel's entry; `held` is value or name (found in the loaded modules)."""
    by_value = kernel.binary is not None and (directory / "kernels" / kernel.binary).exists()
    held = "value" if by_value else "name"
    return {
        "name": kernel.name, "binary": kernel.binary, "held": held, "uses": uses,
        "library": kernel.library,
    }  # fmt: skip


def count_relocations(tables: Tables) -> dict[str, int]:
    """Return the number of relocations for each type of symbol: param, buffer, kv, static, pool, lib, alloc."""
    kinds = [region.symbol.replace("#", ":").partition(":")[0] for region in tables.regions]
    counts = Counter(kinds[i] for i in tables.relocations["region"].tolist())
    return dict(sorted(counts.items()))


def _proof(directory: Path) -> dict[str, Any] | None:
    try:
        proof = read_proof(directory)
    except NotProvenError:
        return None
    return {"graphs": len(proof.proven), "seeds": proof.seeds, "eager": proof.eager}


def diff(one: Path, other: Path) -> dict[str, Any]:
    """Return the differences of two bundles: graphs, kernels, regions, refused graphs, and rows of common graphs."""
    a, b = load(one), load(other)
    names = [{f"{k.name} {k.binary}" for k in t.kernels} for t in (a, b)]
    symbols = [{f"{r.symbol} {r.size}" for r in t.regions} for t in (a, b)]
    both = [key for key in a.keys if key in b.keys]
    return {
        "graphs_only": _only({*a.keys}, {*b.keys}),
        "kernels_only": _only(*names),
        "regions_only": _only(*symbols),
        "refused_only": _only({*a.refused}, {*b.refused}),
        "graphs_changed": {key: counts for key in both if (counts := changes(a, b, key))},
    }


def _only(one: set[str], other: set[str]) -> list[list[str]]:
    return [sorted(one - other), sorted(other - one)]


def changes(a: Tables, b: Tables, key: str) -> dict[str, int]:
    """Return how many rows of a graph differ, by table; {} if none. Surplus rows count as different."""
    (n, e, r), (m, f, s) = a.graph(a.keys.index(key)), b.graph(b.keys.index(key))
    counts = {
        "nodes": _differ(_node_rows(a, n), _node_rows(b, m)),
        "edges": _differ(e.tolist(), f.tolist()),
        "relocations": _differ(_relocation_rows(a, n, r), _relocation_rows(b, m, s)),
        "parameter_bytes": _parameters(a, n, b, m),
    }
    return {name: count for name, count in counts.items() if count}


def _differ(one: Sequence[object], other: Sequence[object]) -> int:
    return sum(x != y for x, y in zip_longest(one, other))


def _node_rows(tables: Tables, nodes: Array) -> list[object]:
    """Return rows that are comparable between bundles: kernels and attributes instead of their numbers."""
    columns = nodes[["kind", "grid", "block", "shared", "size"]].tolist()
    kernels = [tables.kernels[k] if k != NO_KERNEL else None for k in nodes["kernel"].tolist()]
    attributes = [tables.attributes[i] for i in nodes["attributes"].tolist()]
    return [(str(row), *rest) for row, *rest in zip(columns, kernels, attributes, strict=True)]


def _relocation_rows(tables: Tables, nodes: Array, relocations: Array) -> list[object]:
    """Return rows of (node, byte in its payload, symbol, kind, offset)."""
    owner = np.searchsorted(nodes["payload"], relocations["place"], side="right") - 1
    inner = relocations["place"] - nodes["payload"][owner] if len(relocations) else owner
    symbols = [tables.regions[i].symbol for i in relocations["region"].tolist()]
    columns = (
        owner.tolist(),
        inner.tolist(),
        symbols,
        relocations["kind"].tolist(),
        relocations["offset"].tolist(),
    )
    return list(zip(*columns, strict=True))


def _parameters(a: Tables, n: Array, b: Tables, m: Array) -> int:
    one, other = _payload(a, n), _payload(b, m)
    if len(one) != len(other):
        return abs(len(one) - len(other))
    return int(((one != other) & (one != NOISE) & (other != NOISE)).sum())


def _payload(tables: Tables, nodes: Array) -> Array:
    """Return the parameter bytes of a graph; the caller must ignore noise bytes."""
    spans = nodes[["payload", "size"]].tolist()
    return np.concatenate([np.zeros(0, np.uint8), *(tables.payload[p : p + s] for p, s in spans)])
