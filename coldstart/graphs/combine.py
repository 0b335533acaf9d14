"""Combine snapshots of two processes into one relocatable bundle.

bundle.payload[w] is 0 if w is relocated, 0xFF if w is noise, and the captured constant otherwise. The value
0xFF makes the proof show that no kernel reads noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from coldstart.graphs import trace as traces
from coldstart.graphs import windows
from coldstart.graphs.builder import drop_unused_regions, subset
from coldstart.graphs.classify import Classified, differential, settle
from coldstart.graphs.errors import GraphError, format_reasons
from coldstart.graphs.intervals import NONE
from coldstart.graphs.sides import Side, Symbols
from coldstart.graphs.snapshot import Snapshot
from coldstart.graphs.tables import (
    ABSOLUTE,
    ASSUMED,
    BLOCK,
    RELOCATION,
    TENSOR_MAP_BYTES,
    Array,
    SymbolRegion,
    Tables,
)

NOISE = 0xFF


@dataclass
class Combined:
    """Tables with the full contents of pool and library regions, and the addresses of these regions in snapshot `b`."""

    tables: Tables
    adopted: list[SymbolRegion]


def combine(a: Snapshot, b: Snapshot, more: Sequence[Snapshot] = ()) -> Combined:
    """Return the bundle of two captures; the captures `more` decide words that have two readings in the first two.

    Raises:
        BaseCollisionError: The two layouts do not differ.
        GraphError: No graph can be relocated.
    """
    reasons = find_disagreements(a.tables, b.tables)
    for other in more:
        reasons |= {k: v for k, v in find_disagreements(a.tables, other.tables).items() if k not in reasons}
    keys = [key for key in a.tables.keys if key not in reasons]
    if not keys:
        raise GraphError(f"no graph can be relocated: {format_reasons(reasons)}")
    a, b = a.keep(keys), b.keep(keys)
    symbols = Symbols([])
    classified = differential(a, b, symbols)
    for other in more:
        settle(classified, other.keep(keys), symbols)
    tables = _tables(a, classified, symbols, reasons)
    adopted = _adopted(b, classified)
    tables = _with_contents(tables, a, b, classified, symbols)
    conflicts = _describe_conflicts(a, b, classified, symbols)
    kept = subset(tables, lambda key: key not in conflicts, conflicts)
    return Combined(drop_unused_regions(kept), adopted)


def find_disagreements(a: Tables, b: Tables) -> dict[str, str]:
    """Return the graphs that either capture refused or whose structure differs, with the reasons."""
    reasons = {**a.refused, **b.refused}
    theirs = {key: i for i, key in enumerate(b.keys)}
    for index, key in enumerate(a.keys):
        if key not in theirs:
            reasons.setdefault(key, "captured in one process only")
        elif not _same_structure(a, index, b, theirs[key]):
            reasons.setdefault(key, "kernels, launch sizes or edges differ between two captures")
    reasons |= {
        key: "captured in one process only" for key in theirs if key not in a.keys and key not in reasons
    }
    return reasons


def _same_structure(a: Tables, i: int, b: Tables, j: int) -> bool:
    (mine, edges, _), (theirs, other_edges, _) = a.graph(i), b.graph(j)
    if len(mine) != len(theirs) or not np.array_equal(edges, other_edges):
        return False
    same = all(np.array_equal(mine[n], theirs[n]) for n in ("kind", "grid", "block", "shared", "size"))
    launches = zip(mine[mine["kind"] == 0], theirs[theirs["kind"] == 0], strict=False)
    return same and all(
        a.kernels[m["kernel"]] == b.kernels[t["kernel"]]
        and a.attributes[m["attributes"]] == b.attributes[t["attributes"]]
        for m, t in launches
    )


def _describe_conflicts(a: Snapshot, b: Snapshot, classified: Classified, symbols: Symbols) -> dict[str, str]:
    """Return the reason for each graph with a word in live memory that differs: kernel, byte, and both addresses."""
    graphs, first = np.unique(windows.graphs(a.tables, classified.conflict), return_index=True)
    places = classified.conflict[first] // 8 * 8  # payloads and pointers are aligned
    sides = [(Side(s, symbols), windows.values(s.tables.payload, places)) for s in (a, b)]
    found = {}
    for number, (graph, place) in enumerate(zip(graphs.tolist(), places.tolist(), strict=True)):
        owner = a.tables.nodes[int(windows.owners(a.tables, places[number : number + 1])[0])]
        kernel = a.tables.kernels[owner["kernel"]].name if owner["kind"] == 0 else "a memset or copy"
        ends = " and ".join(side.describe(int(values[number])) for side, values in sides)
        found[a.tables.keys[graph]] = (
            f"{kernel}, parameter byte {place - int(owner['payload'])}: a word points into live memory, "
            f"but to different places in the two captures: {ends}"
        )
    return found


def _tables(a: Snapshot, classified: Classified, symbols: Symbols, reasons: dict[str, str]) -> Tables:
    rows = relocations(classified)
    payload = np.array(a.tables.payload)
    width = np.where(classified.kind == ABSOLUTE, 8, TENSOR_MAP_BYTES // 16)
    for bytes_ in np.unique(width).tolist():
        payload[(classified.place[width == bytes_][:, None] + np.arange(bytes_)).ravel()] = 0
    payload[classified.noise] = NOISE
    graph = windows.graphs(a.tables, rows["place"])
    graphs = a.tables.graphs.copy()
    graphs["relocations"] = np.bincount(graph, minlength=len(graphs))
    graphs["relocation"] = np.concatenate([[0], np.cumsum(graphs["relocations"])[:-1]])
    report = {"windows": classified.windows, "pointers": len(classified.place), "noise_bytes": len(classified.noise),
              "conflict_bytes": len(classified.conflict)}  # fmt: skip
    return replace(
        a.tables, graphs=graphs, payload=payload, relocations=rows,
        assumed=_assumed(a.tables, classified, symbols), regions=symbols.regions,
        refused={**a.tables.refused, **reasons}, report=report,
    )  # fmt: skip


def _assumed(tables: Tables, classified: Classified, symbols: Symbols) -> Array:
    """Return the distinct rows of (graph, end_of, start_of).

    PyTorch's allocator places small tensors side by side in the same order in every process. An unnamed allocation that no
    word points into is such a neighbor, not memory of the graph: the word is the start of the named region, and the proof,
    in which nothing lies at the place of the neighbor, decides.
    """
    unnamed = [i for i, region in enumerate(symbols.regions) if region.symbol.startswith("alloc#")]
    neighbors = np.setdiff1d(np.array(unnamed, np.int64), classified.region)
    assumptions = classified.assumed[~np.isin(classified.assumed[:, 1], neighbors)]
    graph = windows.graphs(tables, assumptions[:, 0])
    rows = np.unique(np.stack([graph, assumptions[:, 1], assumptions[:, 2]], 1), axis=0)
    return np.array([tuple(row) for row in rows.tolist()], ASSUMED)


def relocations(classified: Classified) -> Array:
    """Return the relocation rows, sorted by place."""
    order = np.argsort(classified.place, kind="stable")
    rows = np.zeros(len(order), RELOCATION)
    for name in ("place", "region", "offset", "kind"):
        rows[name] = getattr(classified, name)[order]
    return rows


def _adopted(b: Snapshot, classified: Classified) -> list[SymbolRegion]:
    """Return the pool segments and library allocations, with their addresses in `b`."""
    pool = [r for r in b.regions if r.symbol.startswith("pool:")]
    libraries = [SymbolRegion(f"lib:{n}", r.size, r.base) for n, r in enumerate(classified.libraries.theirs)]
    return [*pool, *libraries, *_unnamed(b)]


def _unnamed(snapshot: Snapshot) -> list[SymbolRegion]:
    """Return the live traced allocations with stored contents: memory of tensors that have no name."""
    live = traces.live_blocks(snapshot.trace)
    return [SymbolRegion(f"alloc#{i}", n, a) for i, (a, n) in live.items() if a in snapshot.contents]


def _with_contents(
    tables: Tables, a: Snapshot, b: Snapshot, classified: Classified, symbols: Symbols
) -> Tables:
    """Add all bytes of adopted regions as one block each, with addresses replaced by relocations."""
    left, right = Side(a, symbols), Side(b, symbols)
    pools = [(r.symbol, r.base) for r in a.regions if r.symbol.startswith("pool:")]
    mine = dict(pools) | {f"lib:{n}": r.base for n, r in enumerate(classified.libraries.mine)}
    mine |= {r.symbol: r.base for r in _unnamed(a)}
    wanted = set(classified.region.tolist()) | {symbols.number[symbol] for symbol, _ in pools}
    blocks, data, rows, start = [], [], [], 0
    for region in _adopted(b, classified):
        kept = region.base in b.contents and mine.get(region.symbol) in a.contents
        if symbols.number.get(region.symbol, NONE) not in wanted or not kept:
            continue
        number = symbols.number[region.symbol]
        one, other = (
            np.frombuffer(c, np.uint8) for c in (a.contents[mine[region.symbol]], b.contents[region.base])
        )
        body, pointers = find_content_pointers(one, other, left, right)
        pointers["place"] += start
        blocks.append((number, region.size, 0, start))
        data.append(body)
        rows.append(pointers)
        start += region.size
    return replace(
        tables,
        blocks=np.array(blocks, BLOCK),
        contents=np.concatenate([np.zeros(0, np.uint8), *data]),
        content_relocations=np.concatenate([np.zeros(0, RELOCATION), *rows]),
    )


def find_content_pointers(a: Array, b: Array, left: Side, right: Side) -> tuple[Array, Array]:
    """Return (b with zeros at addresses, relocations) for the aligned words that both processes read alike."""
    whole = len(a) // 8 * 8
    first, second = a[:whole].view("<u8"), b[:whole].view("<u8")
    at = np.flatnonzero(first != second)
    one, other = left.plain(first[at]), right.plain(second[at])
    good = (one.region != NONE) & (one.region == other.region) & (one.offset == other.offset)
    rows = np.zeros(int(good.sum()), RELOCATION)
    rows["place"], rows["region"], rows["offset"] = at[good] * 8, one.region[good], one.offset[good]
    body = b.copy()
    body[:whole].view("<u8")[at[good]] = 0
    return body, rows
