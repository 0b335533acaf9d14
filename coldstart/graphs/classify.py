"""Distinguish pointers from constants by comparing two captures with different memory layouts (MEDUSA, section 4.1).

Common memory exists in both processes: it has the same name, or the same allocation size and number. Its address in the
second process differs by some distance. Let a and b be the same parameter word in the first and the second process:
  a == b                                         -> constant, because a pointer would have moved with its memory
  common memory at a has moved by exactly b - a  -> pointer; this includes the address in a tensor map
  neither a nor b is in live memory              -> noise: padding that no kernel reads, which verification confirms
  otherwise                                      -> conflict, and the graph is refused
Several allocations can have had the same address in the graphs' pool, and any of them identifies a pointer. A pointer is
stored by its location in the second process, which captured the graph. As in the paper, a word belongs to the memory that
contains it. A word outside all memory can be the end address of the memory before it. If an end address was classified as
the start of the next memory, verification fails.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from coldstart.graphs.errors import GraphRefusedError
from coldstart.graphs.record import Snapshot
from coldstart.graphs.tables import (
    ABSOLUTE,
    NONE,
    RELOCATION,
    TENSOR_MAP,
    TENSOR_MAP_BYTES,
    Array,
    Graph,
    Intervals,
    SymbolRegion,
    values,
)

# Memory common to both processes: both addresses and the size.
COMMON = np.dtype([("a", "<u8"), ("b", "<u8"), ("size", "<u8")])


class Memory:
    """Memory of both processes. `regions` are the regions of the second process, and relocations refer to them by index."""

    def __init__(self, a: Snapshot, b: Snapshot) -> None:
        self._a, self._b = a, b
        self.regions = [*b.regions, *b.pool, *b.unnamed()]
        self._first = [*a.regions, *a.pool, *a.unnamed()]
        self._live = [
            Intervals(regions)
            for s, own in ((a, self._first), (b, self.regions))
            for regions in (own, s.ranges)
        ]
        self._common = find_common_memory(a, b)
        self._libraries = [(s.libraries(), Intervals(s.libraries())) for s in (a, b)]
        self.pairs: dict[int, int] = {}
        self._refresh()

    def _refresh(self) -> None:
        """Index the regions by address, and common memory by distance, as disjoint intervals [start, end) in process `a`."""
        self._where = Intervals(self.regions)
        self._moved: dict[int, tuple[Array, Array, Array]] = {}
        distance = self._common["b"] - self._common["a"]
        order = np.lexsort((self._common["a"], distance))
        distances, cuts = np.unique(distance[order], return_index=True)
        for moved, rows in zip(distances.tolist(), np.split(self._common[order], cuts[1:]), strict=False):
            ends = rows["a"] + rows["size"]
            reach = np.maximum.accumulate(ends)
            first = np.concatenate([[True], rows["a"][1:] > reach[:-1]])
            last = np.append(np.flatnonzero(first)[1:] - 1, len(rows) - 1)
            self._moved[moved] = (rows["a"][first], reach[last], np.unique(ends))

    def explain(self, a: Array, b: Array) -> tuple[Array, Array]:
        """Return two masks: the pairs of words that point into common memory, and the pairs that point one past its end."""
        inside, past = self._find_relocated(a, b)
        if self._pair_libraries(a[~inside], b[~inside]):
            inside, past = self._find_relocated(a, b)
        inside &= self._where.find(b) != NONE
        return inside, past & ~inside & (self._where.find(b - np.uint64(1)) != NONE)

    def _find_relocated(self, a: Array, b: Array) -> tuple[Array, Array]:
        inside, past = np.zeros(len(a), bool), np.zeros(len(a), bool)
        distances, group = np.unique(b - a, return_inverse=True)
        for number, distance in enumerate(distances.tolist()):
            if distance in self._moved:
                starts, reach, ends = self._moved[distance]
                mine = np.flatnonzero(group == number)
                at = np.searchsorted(starts, a[mine], side="right") - 1
                inside[mine] = (at >= 0) & (a[mine] < reach[np.maximum(at, 0)])
                past[mine] = np.isin(a[mine], ends)
        return inside, past

    def _pair_libraries(self, a: Array, b: Array) -> bool:
        """Pair library allocations, which have no order, by words at equal offsets. Return whether a new pair was found."""
        (mine, one), (theirs, other) = self._libraries
        left, right = one.find(a), other.find(b)
        before = len(self.pairs)
        for i in np.flatnonzero((left != NONE) & (right != NONE)).tolist():
            x, y = int(left[i]), int(right[i])
            p, q = mine[x], theirs[y]
            taken = x in self.pairs or y in self.pairs.values()
            if taken or p.size != q.size or int(a[i]) - p.base != int(b[i]) - q.base:
                continue
            self.pairs[x] = y
            self.regions.append(SymbolRegion(f"lib:{len(self.pairs) - 1}", q.size, q.base))
            self._common = np.append(self._common, np.array([(p.base, q.base, q.size)], COMMON))
        if found := len(self.pairs) > before:
            self._refresh()
        return found

    def locate(self, addresses: Array) -> tuple[Array, Array]:
        """Return the region (or NONE) that contains each address of the second process, and the offset in that region."""
        region = self._where.find(addresses)
        base = np.array([r.base for r in self.regions] + [0], np.uint64)[region]
        return region, np.where(region != NONE, addresses - base, 0).astype(np.int64)

    def pair_contents(self) -> dict[int, int]:
        """Return, for each memory block that outlives the capture, its address in the first process by that in the second."""
        (mine, _), (theirs, _) = self._libraries
        libraries = {theirs[y].base: mine[x].base for x, y in self.pairs.items()}
        return {b: a for a, b, _ in find_common_memory(self._a, self._b, live_only=True).tolist()} | libraries

    def are_live(self, a: Array, b: Array) -> Array:
        """Return a mask of the pairs of words in which at least one word points into live memory."""
        hits = [where.find(word) != NONE for word, where in zip((a, a, b, b), self._live, strict=True)]
        live: Array = np.logical_or.reduce(hits)
        return live

    def describe(self, a: int, b: int) -> str:
        """Describe each address by the region that contains it or, if there is none, by the nearest region below it."""
        return f"{_describe(a, self._first)} and {_describe(b, self.regions)}"

    def check_moved(self, graphs: Iterable[tuple[Array, Array]]) -> None:
        """Raise GraphRefusedError if a word points to memory that did not move: such a pointer looks like a constant."""
        stuck = self._common[self._common["a"] == self._common["b"]]
        bases = {r.base for r in self._a.ranges}
        spans = stuck[["b", "size"]].tolist() + [(r.base, r.size) for r in self._b.ranges if r.base in bases]
        equal = np.unique(np.concatenate([np.zeros(0, np.uint64), *(a[a == b] for a, b in graphs)]))
        for base, size in sorted(spans):
            if ((equal >= base) & (equal <= base + size)).any():
                raise GraphRefusedError(
                    f"{_describe(base, self.regions)} has the same address in both captures: its pointers look like constants"
                )


def _describe(address: int, regions: list[SymbolRegion]) -> str:
    below = [r for r in regions if r.base <= address]
    nearest = max(below, key=lambda r: r.base, default=None)
    if nearest is None:
        return f"{address:#x} (below all regions)"
    offset = address - nearest.base
    inside = f"{nearest.symbol}+{offset}"
    return f"{address:#x} ({inside if offset < nearest.size else f'{offset} bytes after {nearest.symbol}'})"


def find_common_memory(a: Snapshot, b: Snapshot, *, live_only: bool = False) -> Array:
    """Return COMMON rows of the memory in both snapshots. If `live_only` is True, omit freed memory in the pool."""
    theirs = {(r.symbol, r.size): r.base for r in [*b.regions, *b.unnamed()]}
    pairs = [(r.base, theirs.get((r.symbol, r.size)), r.size) for r in [*a.regions, *a.unnamed()]]
    state = "live" if live_only else "pool"
    one, other = (s.allocations[s.allocations["pool"] & s.allocations[state]] for s in (a, b))
    # Graphs are captured one after another and reuse the pool's memory, so every allocation counts.
    same = ["size", "number"]
    _, left, right = np.intersect1d(one[same], other[same], return_indices=True)
    pool = np.zeros(len(left), COMMON)
    pool["a"], pool["b"], pool["size"] = one["address"][left], other["address"][right], one["size"][left]
    return np.concatenate([np.array([p for p in pairs if p[1] is not None], COMMON), pool[pool["size"] > 0]])


@dataclass
class Classifier:
    """Classifier of the words of one graph in two captures. `open` marks the differing bytes that are not yet explained.

    `run` sets `relocations` to Memory.regions, and the indices of the payload bytes in `noise` and `conflict`.
    """

    memory: Memory
    a: Graph
    b: Graph
    maps: tuple[Array, Array]

    def __post_init__(self) -> None:
        self.open: Array = np.asarray(self.a.payload != self.b.payload)
        self._rows = [np.zeros(0, RELOCATION)]

    def run(self, aligned: Array, everywhere: Array) -> Classifier:
        """Classify the parameter words, and return this classifier.

        `aligned` are payload offsets at every fourth byte of a parameter, and `everywhere` at every byte.
        """
        a, b = self._words(aligned)
        self._find_pointers(aligned[a != b])
        self._find_maps()
        self._find_pointers(self._still_open(everywhere))
        self.noise, self.conflict = self._split_rest(self._still_open(everywhere))
        rows = np.concatenate(self._rows)
        self.relocations = rows[np.argsort(rows["place"], kind="stable")]
        return self

    def _words(self, at: Array) -> tuple[Array, Array]:
        return values(self.a.payload, at), values(self.b.payload, at)

    def _still_open(self, everywhere: Array) -> Array:
        touching: Array = everywhere[self.open[everywhere[:, None] + np.arange(8)].any(1)]
        return touching

    def _find_pointers(self, place: Array) -> None:
        a, b = self._words(place)
        inside, past = self.memory.explain(a, b)
        chosen = choose(place, inside | past)
        self._add(place[chosen], b[chosen], past[chosen], ABSOLUTE, 8)

    def _add(self, place: Array, b: Array, past: Array, kind: int, size: int) -> None:
        rows = np.zeros(len(place), RELOCATION)
        rows["place"], rows["kind"] = place, kind
        region, offset = self.memory.locate(b - past)
        rows["region"], rows["offset"] = region, offset + past
        self._rows.append(rows)
        self.open[(place[:, None] + np.arange(size)).ravel()] = False

    def _find_maps(self) -> None:
        """Add the tensor maps whose address moved with common memory, if this explains all of their differing bytes.

        Any 128 aligned bytes can be decoded as a tensor map. The other bytes of a map encode shape and stride, which do
        not depend on the memory layout.
        """
        one, other = self.maps
        place, first, second = np.intersect1d(one["place"], other["place"], return_indices=True)
        place = place.astype(np.int64)
        still = self.open[place[:, None] + np.arange(TENSOR_MAP_BYTES)]
        needed = still.any(1) & ~(still & ~one["coded"][first]).any(1)
        a, b, place = one["address"][first[needed]], other["address"][second[needed]], place[needed]
        good, _ = self.memory.explain(a, b)
        self._add(place[good], b[good], np.zeros(len(place), bool)[good], TENSOR_MAP, TENSOR_MAP_BYTES)

    def _split_rest(self, place: Array) -> tuple[Array, Array]:
        """Return the offsets of the unexplained bytes that are noise, and the offsets of those in conflict."""
        live = self.memory.are_live(*self._words(place))
        suspect = np.zeros(len(self.open), bool)
        suspect[(place[live][:, None] + np.arange(8)).ravel()] = True
        return np.flatnonzero(self.open & ~suspect), np.flatnonzero(self.open & suspect)


def choose(place: Array, proven: Array) -> Array:
    """Choose non-overlapping `proven` words, and return their indices in `place`. Prefer 8-byte, then 4-byte alignment."""
    candidates, chosen, taken = np.flatnonzero(proven), list[int](), set[int]()
    at = place[candidates]
    for i in candidates[np.lexsort((at % 4 != 0, at % 8 != 0))].tolist():
        span = range(int(place[i]), int(place[i]) + 8)
        if taken.isdisjoint(span):
            taken.update(span)
            chosen.append(i)
    return np.array(chosen, np.int64)
