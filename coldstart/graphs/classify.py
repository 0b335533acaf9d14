"""Two-layout differential classification.

Let a, b be one parameter word in two processes whose region bases all differ.
  a == b                                  -> constant (a pointer would have moved with its base);
  (symbol, offset)(a) == (symbol, offset)(b) -> proven pointer;
  the same for a tensor map's address     -> proven tensor-map pointer;
  otherwise, no live memory at either     -> noise: padding that the kernel never reads; the proof decides
  otherwise                               -> conflict: the graph is rejected.
The start of one region may be the end of another in both processes. Such a word is read as the start. The assumption that
the two regions touch is recorded, and every restore checks it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from coldstart.graphs import windows
from coldstart.graphs.errors import BaseCollisionError
from coldstart.graphs.intervals import NONE, Reading
from coldstart.graphs.sides import Pairing, Side, Symbols, Words
from coldstart.graphs.snapshot import Snapshot
from coldstart.graphs.tables import ABSOLUTE, TENSOR_MAP, TENSOR_MAP_BYTES, Array, SymbolRegion

Found = tuple[Array, Array, Array, Array]


@dataclass
class Classified:
    """Result: `place`, `region`, `offset` and `kind` are columns of relocations; noise and conflict are payload bytes.

    `assumed` has rows of (place, region whose end the word may be, region whose start it is read as).
    """

    place: Array
    region: Array
    offset: Array
    kind: Array
    noise: Array
    conflict: Array
    windows: int
    assumed: Array
    libraries: Pairing


def differential(a: Snapshot, b: Snapshot, symbols: Symbols) -> Classified:
    """Classify every word of two snapshots with equal structure. Raises BaseCollisionError."""
    return _Differential(a, b, symbols).run()


@dataclass
class _Differential:
    a: Snapshot
    b: Snapshot
    symbols: Symbols
    pairing: Pairing = field(default_factory=Pairing)
    assumed: list[Array] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left, self.right = Side(self.a, self.symbols), Side(self.b, self.symbols)
        self.open: Array = np.asarray(self.a.tables.payload != self.b.tables.payload)

    def run(self) -> Classified:
        check_collision(self.a, self.b)
        parts = [self._aligned(), self._maps(), self._packed()]
        noise, conflict = self._rest()
        place, region, offset, kind = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        count = len(windows.places(self.a.tables))
        assumed = np.concatenate([np.zeros((0, 3), np.int64), *self.assumed])
        return Classified(place, region, offset, kind, noise, conflict, count, assumed, self.pairing)

    def _words(self, at: Array) -> Words:
        payloads = (self.a.tables.payload, self.b.tables.payload)
        return Words(at, *(windows.values(payload, at) for payload in payloads))

    def _aligned(self) -> Found:
        """Explain windows at 4-byte stride."""
        words = self._words(windows.places(self.a.tables))
        differs = words.a != words.b
        return self._explain(Words(words.place[differs], words.a[differs], words.b[differs]))

    def _still_open(self) -> Array:
        """Return the windows at any byte that contain an unexplained byte."""
        if not self.open.any():
            return np.zeros(0, np.int64)
        at = windows.places(self.a.tables, 1)
        touching: Array = at[self.open[at[:, None] + np.arange(8)].any(1)]
        return touching

    def _packed(self) -> Found:
        """Explain pointers at any byte, as in packed structs."""
        return self._explain(self._words(self._still_open()))

    def _explain(self, words: Words) -> Found:
        """Return the proven pointers among the words, and mark their bytes as explained."""
        region, offset = self._agree(words)
        chosen = choose(words.place, region != NONE)
        place = words.place[chosen]
        self.open[(place[:, None] + np.arange(8)).ravel()] = False
        self._assume(Words(place, words.a[chosen], words.b[chosen]), region[chosen], offset[chosen])
        return place, region[chosen], offset[chosen], np.full(len(chosen), ABSOLUTE)

    def _agree(self, words: Words) -> tuple[Array, Array]:
        """Return the (symbol, offset) that both processes read in each word, or NONE; insides precede ends."""
        out = Reading(np.full(len(words.place), NONE), np.zeros(len(words.place), np.int64))
        firsts = self.left.readings(words.a)
        seconds = self.right.readings(words.b)
        _merge(out, firsts[:2], seconds[:2])
        self._pair_libraries(words, out)
        _merge(out, firsts[2:], seconds[2:])
        return out.region, out.offset

    def _pair_libraries(self, words: Words, out: Reading) -> None:
        """Read words that point into driver allocations in both processes, at one offset."""
        one, other = self.left.driver.inside(words.a), self.right.driver.inside(words.b)
        both = (
            (out.region == NONE)
            & (one.region != NONE)
            & (other.region != NONE)
            & (one.offset == other.offset)
        )
        for i in np.flatnonzero(both).tolist():
            mine = self.left.device[int(one.region[i])]
            number = self.pairing.number(mine, self.right.device[int(other.region[i])])
            if number is not None:
                out.region[i], out.offset[i] = self.symbols.add(f"lib:{number}", mine.size), one.offset[i]

    def _assume(self, words: Words, region: Array, offset: Array) -> None:
        """Record words at the start of a region that both processes could also read as the end of another region."""
        starts = np.flatnonzero(offset == 0)
        one = self.left.readings(words.a[starts])
        other = self.right.readings(words.b[starts])
        for mine, theirs in zip(one[2:], other[2:], strict=True):
            both = (mine.region != NONE) & (mine.region == theirs.region) & (mine.region != region[starts])
            rows = np.stack([words.place[starts], mine.region, region[starts]], 1)
            self.assumed.append(rows[both].astype(np.int64))

    def _maps(self) -> Found:
        """Return tensor maps whose decoded addresses agree in both processes, if all their other bytes are explained.

        Any aligned 128 bytes can be decoded. The other bytes of a map encode shape and stride, which do not
        depend on the layout.
        """
        one, other = self.a.maps, self.b.maps
        place, first, second = np.intersect1d(one["place"], other["place"], return_indices=True)
        place = place.astype(np.int64)
        open_ = self.open[place[:, None] + np.arange(TENSOR_MAP_BYTES)]
        needed = open_.any(1) & ~(open_ & ~one["held"][first]).any(1)
        words = Words(place[needed], one["address"][first[needed]], other["address"][second[needed]])
        region, offset = self._agree(words)
        good = region != NONE
        self.open[(words.place[good][:, None] + np.arange(TENSOR_MAP_BYTES)).ravel()] = False
        return words.place[good], region[good], offset[good], np.full(int(good.sum()), TENSOR_MAP)

    def _rest(self) -> tuple[Array, Array]:
        """Split the unexplained bytes into noise and conflict."""
        words = self._words(self._still_open())
        live = self.left.hits(words.a) | self.right.hits(words.b)
        suspect = np.zeros(len(self.open), bool)
        suspect[(words.place[live][:, None] + np.arange(8)).ravel()] = True
        return np.flatnonzero(self.open & ~suspect), np.flatnonzero(self.open & suspect)


def settle(classified: Classified, other: Snapshot, symbols: Symbols) -> None:
    """Use one more layout to decide words that may be the end of one region or the start of another."""
    place, end_of, start_of = classified.assumed.T
    side, address = Side(other, symbols), windows.values(other.tables.payload, place)
    readings = side.readings(address)
    starts = np.zeros(len(place), bool)
    for reading in readings[:2]:
        starts |= (reading.region == start_of) & (reading.offset == 0)
    starts |= side.driver.inside(address).region != NONE
    ends = np.zeros(len(place), bool)
    for reading in readings[2:]:
        ends |= reading.region == end_of
    as_end = ends & ~starts
    order = np.argsort(classified.place, kind="stable")
    rows = order[np.searchsorted(classified.place[order], place[as_end])] if as_end.any() else order[:0]
    classified.region[rows] = end_of[as_end]
    classified.offset[rows] = [symbols.regions[i].size for i in end_of[as_end].tolist()]
    classified.assumed = classified.assumed[starts == ends]


def _merge(out: Reading, firsts: list[Reading], seconds: list[Reading]) -> None:
    """Fill the unread words with the first pair of readings that agree."""
    for one in firsts:
        for other in seconds:
            same = (one.region != NONE) & (one.region == other.region) & (one.offset == other.offset)
            fresh = same & (out.region == NONE)
            out.region[fresh], out.offset[fresh] = one.region[fresh], one.offset[fresh]


def check_collision(a: Snapshot, b: Snapshot) -> None:
    """Raise BaseCollisionError if memory that did not move has pointers to it: they would look like constants."""
    stuck = find_unmoved(a, b)
    if not stuck:
        return
    at = windows.places(a.tables, 1)
    first, second = (windows.values(s.tables.payload, at) for s in (a, b))
    equal = first[first == second]
    for region in stuck:
        if ((equal >= region.base) & (equal <= region.base + region.size)).any():
            raise BaseCollisionError(
                f"{region.symbol} has the same address in both captures, so its pointers look like constants"
            )


def find_unmoved(a: Snapshot, b: Snapshot) -> list[SymbolRegion]:
    """Return the named regions, driver allocations and traced allocations with the same address in both snapshots."""
    theirs, ranges = set(b.regions), {r.base for r in b.ranges}
    regions = [r for r in a.regions if r in theirs]
    regions += [SymbolRegion("a driver allocation", r.size, r.base) for r in a.ranges if r.base in ranges]
    one, other = (s.trace[s.trace["kind"] == 0] for s in (a, b))
    count = min(len(one), len(other))
    same = np.flatnonzero(one["address"][:count] == other["address"][:count])
    return regions + [
        SymbolRegion(f"alloc#{i}", int(one["size"][i]), int(one["address"][i])) for i in same.tolist()
    ]


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
