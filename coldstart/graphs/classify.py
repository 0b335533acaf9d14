"""Tell pointers from constants by two captures in two processes whose memory lies elsewhere (MEDUSA, section 4.1).

Memory that both processes have (a name, or an allocation with the same size and number) lies `b - a` bytes further in the
second process. Let a, b be one parameter word in both:
  a == b                                          -> constant: a pointer would have moved with its memory;
  common memory at a was moved by exactly b - a   -> pointer, also through the address in a tensor map;
  otherwise, no live memory at either             -> noise: padding that the kernel never reads; the proof decides;
  otherwise                                       -> conflict: the graph is refused.
An address of the pool can have had several allocations. Any of them proves the pointer: it is stored by its place in the second
process, where the graph was captured as it is.
The start of one region may be the end of another in both processes. Such a word is read as the start. If a process finds both
by name, every restore checks that they touch there too. Otherwise they lie apart in every restore, and the proof decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from coldstart.graphs import words
from coldstart.graphs.errors import BaseCollisionError
from coldstart.graphs.record import Snapshot
from coldstart.graphs.tables import (
    ABSOLUTE,
    RELOCATION,
    TENSOR_MAP,
    TENSOR_MAP_BYTES,
    TOUCHING,
    Array,
    Graph,
    SymbolRegion,
)
from coldstart.graphs.words import NONE, Intervals

# Memory that both processes have: its addresses and its size.
COMMON = np.dtype([("a", "<u8"), ("b", "<u8"), ("size", "<u8")])


@dataclass
class Classified:
    """Result for one graph: relocations, pairs of touching regions, and the payload bytes that are noise or in conflict.

    The region numbers are those of `Memory.regions`.
    """

    relocations: Array
    touching: Array
    noise: Array
    conflict: Array
    windows: int


class Memory:
    """Memory of two processes; `regions` are those of the second one, to which relocations refer."""

    def __init__(self, a: Snapshot, b: Snapshot) -> None:
        self._a, self._b = a, b
        self.regions = [*b.regions, *b.pool, *b.unnamed()]
        self._common = find_common(a, b)
        self._libraries = [(s.libraries(), Intervals(s.libraries())) for s in (a, b)]
        self.pairs: dict[int, int] = {}
        self._refresh()

    def _refresh(self) -> None:
        self._where = Intervals(self.regions)
        sides = ((self._a, [*self._a.regions, *self._a.pool, *self._a.unnamed()]), (self._b, self.regions))
        self._live = [
            [Intervals(regions), Intervals([SymbolRegion("", r.size, r.base) for r in s.ranges])]
            for s, regions in sides
        ]
        # By distance: the disjoint intervals [start, end) of `a`, and the ends of all parts.
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
        """Return for each pair of words whether it is an address inside, and one past the end, of common memory."""
        inside, past = self._find_moved(a, b)
        if self._pair_libraries(a[~inside], b[~inside]):
            inside, past = self._find_moved(a, b)
        return inside & (self._where.find(b) != NONE), past & (self._where.find(b - np.uint64(1)) != NONE)

    def _find_moved(self, a: Array, b: Array) -> tuple[Array, Array]:
        inside, past = np.zeros(len(a), bool), np.zeros(len(a), bool)
        distances, group = np.unique(b - a, return_inverse=True)
        for number, distance in enumerate(distances.tolist()):
            if distance not in self._moved:
                continue
            starts, reach, ends = self._moved[distance]
            mine = np.flatnonzero(group == number)
            at = np.searchsorted(starts, a[mine], side="right") - 1
            inside[mine] = (at >= 0) & (a[mine] < reach[np.maximum(at, 0)])
            past[mine] = np.isin(a[mine], ends)
        return inside, past

    def _pair_libraries(self, a: Array, b: Array) -> bool:
        """Pair allocations of libraries, which have no order, one to one by words at an equal offset; return if any is new."""
        (mine, one), (theirs, other) = self._libraries
        left, right = one.find(a), other.find(b)
        both = np.flatnonzero((left != NONE) & (right != NONE))
        before = len(self.pairs)
        for i in both.tolist():
            x, y = int(left[i]), int(right[i])
            p, q = mine[x], theirs[y]
            if (
                x in self.pairs
                or y in self.pairs.values()
                or p.size != q.size
                or int(a[i]) - p.base != int(b[i]) - q.base
            ):
                continue
            self.pairs[x] = y
            self.regions.append(SymbolRegion(f"lib:{len(self.pairs) - 1}", q.size, q.base))
            self._common = np.append(self._common, np.array([(p.base, q.base, q.size)], COMMON))
        if len(self.pairs) > before:
            self._refresh()
        return len(self.pairs) > before

    def locate(self, addresses: Array) -> tuple[Array, Array]:
        """Return the region of each address of the second process, or NONE, and the offset in it."""
        region = self._where.find(addresses)
        base = np.array([r.base for r in self.regions] + [0], np.uint64)[region]
        return region, np.where(region != NONE, addresses - base, 0).astype(np.int64)

    def pair_contents(self) -> dict[int, int]:
        """Return the address in the first process of memory that outlives the capture, by its address in the second."""
        rows = find_common(self._a, self._b, "live").tolist()
        libraries = [
            (self._libraries[0][0][x].base, self._libraries[1][0][y].base, 0) for x, y in self.pairs.items()
        ]
        return {b: a for a, b, _ in [*rows, *libraries]}

    def are_live(self, a: Array, b: Array) -> Array:
        """Return whether any known live memory is at either word of each pair."""
        hits = [
            where.find(word) != NONE
            for word, sides in ((a, self._live[0]), (b, self._live[1]))
            for where in sides
        ]
        live: Array = np.logical_or.reduce(hits)
        return live

    def describe(self, a: int, b: int) -> str:
        """Return both addresses, each with the region that contains it or else the nearest region below."""
        sides = ((a, [*self._a.regions, *self._a.pool, *self._a.unnamed()]), (b, self.regions))
        return " and ".join(_describe(address, regions) for address, regions in sides)

    def check_moved(self, graphs: Iterable[tuple[Array, Array]]) -> None:
        """Raise BaseCollisionError if a word points to memory that did not move: it looks like a constant."""
        stuck = self._common[self._common["a"] == self._common["b"]]
        stuck = np.unique(stuck[["b", "size"]])
        bases = {r.base for r in self._a.ranges}
        spans = [*stuck.tolist(), *((r.base, r.size) for r in self._b.ranges if r.base in bases)]
        if not spans:
            return
        equal = np.unique(np.concatenate([np.zeros(0, np.uint64), *(a[a == b] for a, b in graphs)]))
        for base, size in spans:
            if ((equal >= base) & (equal <= base + size)).any():
                raise BaseCollisionError(
                    f"{_describe(base, self.regions)} has the same address in both captures: its pointers look like constants"
                )


def _describe(address: int, regions: list[SymbolRegion]) -> str:
    below = [r for r in regions if r.base <= address]
    nearest = max(below, key=lambda r: r.base, default=None)
    if nearest is None:
        return f"{address:#x} (below all regions)"
    offset = address - nearest.base
    place = (
        f"{nearest.symbol}+{offset}" if offset < nearest.size else f"{offset} bytes after {nearest.symbol}"
    )
    return f"{address:#x} ({place})"


def find_common(a: Snapshot, b: Snapshot, of_pool: str = "pool") -> Array:
    """Return rows of COMMON for the memory that both processes have; with `of_pool` live, without what the pool has freed."""
    theirs = {(r.symbol, r.size): r.base for r in [*b.regions, *b.unnamed()]}
    rows = [
        (r.base, theirs[r.symbol, r.size], r.size)
        for r in [*a.regions, *a.unnamed()]
        if (r.symbol, r.size) in theirs
    ]
    pools = [s.allocations[s.allocations["pool"] & s.allocations[of_pool]] for s in (a, b)]
    # The graphs of a process are captured one after another, so later ones reuse the pool's memory: every allocation counts.
    _, one, other = np.intersect1d(*(p[["size", "number"]] for p in pools), return_indices=True)
    pool = np.zeros(len(one), COMMON)
    pool["a"], pool["b"], pool["size"] = (
        pools[0]["address"][one],
        pools[1]["address"][other],
        pools[0]["size"][one],
    )
    return np.concatenate([np.array(rows, COMMON), pool[pool["size"] > 0]])


@dataclass
class Classifier:
    """Words of one graph in two captures; `open` are the payload bytes that differ and are not explained yet."""

    memory: Memory
    a: Graph
    b: Graph
    maps: tuple[Array, Array]

    def __post_init__(self) -> None:
        self.open: Array = np.asarray(self.a.payload != self.b.payload)
        self._rows: list[Array] = []
        self._touching: list[Array] = []

    def run(self, aligned: Array, everywhere: Array) -> Classified:
        """Classify; `aligned` are the windows at 4-byte stride, `everywhere` those at any byte, as in packed structs."""
        a, b = self._words(aligned)
        self._find_pointers(aligned[a != b])
        self._find_maps()
        self._find_pointers(self._still_open(everywhere))
        noise, conflict = self._split_rest(self._still_open(everywhere))
        rows = np.concatenate([np.zeros(0, RELOCATION), *self._rows])
        touching = np.unique(np.concatenate([np.zeros(0, TOUCHING), *self._touching]))
        return Classified(
            rows[np.argsort(rows["place"], kind="stable")], touching, noise, conflict, len(aligned)
        )

    def _words(self, at: Array) -> tuple[Array, Array]:
        return words.values(self.a.payload, at), words.values(self.b.payload, at)

    def _still_open(self, everywhere: Array) -> Array:
        if not self.open.any():
            return np.zeros(0, np.int64)
        touching: Array = everywhere[self.open[everywhere[:, None] + np.arange(8)].any(1)]
        return touching

    def _find_pointers(self, place: Array) -> None:
        a, b = self._words(place)
        inside, past = self.memory.explain(a, b)
        chosen = choose(place, inside | past)
        self._add(place[chosen], b[chosen], inside[chosen], past[chosen], ABSOLUTE)
        self.open[(place[chosen][:, None] + np.arange(8)).ravel()] = False

    def _add(self, place: Array, b: Array, inside: Array, past: Array, kind: int) -> None:
        """Add relocations; an address one past the end of memory belongs to the region before it."""
        one = np.uint64(1)
        region, offset = self.memory.locate(b)
        before, rest = self.memory.locate(b - one)
        rows = np.zeros(len(place), RELOCATION)
        rows["place"], rows["kind"] = place, kind
        rows["region"], rows["offset"] = np.where(inside, region, before), np.where(inside, offset, rest + 1)
        self._rows.append(rows)
        both = inside & past & (region != before)
        touching = np.zeros(int(both.sum()), TOUCHING)
        touching["end_of"], touching["start_of"] = before[both], region[both]
        self._touching.append(touching)

    def _find_maps(self) -> None:
        """Add the tensor maps whose addresses have moved with common memory, if all their other bytes are explained.

        Any aligned 128 bytes can be decoded. The other bytes of a map encode shape and stride, which do not
        depend on the layout.
        """
        one, other = self.maps
        place, first, second = np.intersect1d(one["place"], other["place"], return_indices=True)
        place = place.astype(np.int64)
        still = self.open[place[:, None] + np.arange(TENSOR_MAP_BYTES)]
        needed = still.any(1) & ~(still & ~one["coded"][first]).any(1)
        a, b, place = one["address"][first[needed]], other["address"][second[needed]], place[needed]
        inside, past = self.memory.explain(a, b)
        good = inside | past
        self._add(place[good], b[good], inside[good], past[good], TENSOR_MAP)
        self.open[(place[good][:, None] + np.arange(TENSOR_MAP_BYTES)).ravel()] = False

    def _split_rest(self, place: Array) -> tuple[Array, Array]:
        """Split the unexplained bytes into noise and conflict."""
        live = self.memory.are_live(*self._words(place))
        suspect = np.zeros(len(self.open), bool)
        suspect[(place[live][:, None] + np.arange(8)).ravel()] = True
        return np.flatnonzero(self.open & ~suspect), np.flatnonzero(self.open & suspect)


def choose(place: Array, proven: Array) -> Array:
    """Return non-overlapping windows among the `proven` ones, preferring alignment to 8 bytes, then to 4.

    Compilers align pointers, so an aligned window is more likely the pointer.
    """
    candidates = np.flatnonzero(proven)
    aligned = place[candidates] % 8 == 0
    chosen = candidates[aligned].tolist()
    taken = set((place[chosen][:, None] + np.arange(8)).ravel().tolist()) if (~aligned).any() else set()
    rest = candidates[~aligned]
    for i in rest[np.argsort(place[rest] % 4 != 0, kind="stable")].tolist():
        span = range(int(place[i]), int(place[i]) + 8)
        if taken.isdisjoint(span):
            taken.update(span)
            chosen.append(i)
    return np.array(chosen, np.int64)
