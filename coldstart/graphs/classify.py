"""Two-layout differential classification.

Let a, b be one parameter word in two processes whose region bases all differ.
  a == b                                  -> constant (a pointer would have moved with its base)
  (symbol, offset)(a) == (symbol, offset)(b) -> pointer, proven
  the same for a tensor map's address     -> tensor-map pointer, proven
  otherwise, no live memory at either     -> noise: padding that the kernel never reads; the proof decides
  otherwise                               -> conflict: the graph is refused
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from coldstart.graphs import trace as traces
from coldstart.graphs import windows
from coldstart.graphs.errors import BaseCollision
from coldstart.graphs.intervals import NONE, Intervals, Reading
from coldstart.graphs.snapshot import Snapshot
from coldstart.graphs.table import ABSOLUTE, TENSOR_MAP, TENSOR_MAP_BYTES, Array, Region


@dataclass
class Symbols:
    """All symbols of a bundle, and for each process where they are."""

    regions: list[Region]
    number: dict[str, int] = field(default_factory=dict)

    def add(self, symbol: str, size: int) -> int:
        """The number of a symbol, made at first use."""
        if symbol not in self.number:
            self.number[symbol] = len(self.regions)
            self.regions.append(Region(symbol, size))
        return self.number[symbol]


@dataclass
class Words:
    """Aligned arrays over the windows that differ: place, value in each process, up to three readings."""

    place: Array
    a: Array
    b: Array


@dataclass
class Pairing:
    """Driver allocations that no tensor reaches (lib:n), paired by equal offset and size, one to one."""

    mine: list[Region] = field(default_factory=list)
    theirs: list[Region] = field(default_factory=list)

    def number(self, one: Region, other: Region) -> int | None:
        """n of lib:n, or None where either is already paired with another or their sizes differ."""
        if one in self.mine or other in self.theirs:
            same = (
                one in self.mine and other in self.theirs and self.mine.index(one) == self.theirs.index(other)
            )
            return self.mine.index(one) if same else None
        if one.size != other.size:
            return None
        self.mine.append(one)
        self.theirs.append(other)
        return len(self.mine) - 1


@dataclass
class Classified:
    """`place`, `region`, `offset`, `kind` describe relocations; noise and conflict are payload bytes."""

    place: Array
    region: Array
    offset: Array
    kind: Array
    noise: Array
    conflict: Array
    windows: int
    libraries: Pairing = field(default_factory=Pairing)


class Side:
    """How one snapshot reads addresses, in shared symbol numbers."""

    def __init__(self, snapshot: Snapshot, symbols: Symbols) -> None:
        self.snapshot, self._symbols = snapshot, symbols
        self.named = Intervals(snapshot.regions)
        self._numbers = np.array([*(symbols.add(r.symbol, r.size) for r in snapshot.regions), NONE])
        self.device = [Region("", r.size, r.base) for r in snapshot.ranges if not r.host]
        self.driver = Intervals(self.device)

    def plain(self, address: Array) -> Reading:
        """Named regions only, by any number of the shared symbols."""
        return self._named(self.named.inside(address))

    def _named(self, reading: Reading) -> Reading:
        return Reading(self._numbers[reading.region], reading.offset)

    def readings(self, place: Array, address: Array) -> list[Reading]:
        """Inside a region, a traced allocation, or one past the end of a region: in order of trust."""
        inside = self._named(self.named.inside(address))
        traced = self._traced(place, address, inside)
        return [inside, traced, self._named(self.named.past_end(address))]

    def _traced(self, place: Array, address: Array, inside: Reading) -> Reading:
        out = Reading(np.full(len(address), NONE), np.zeros(len(address), np.int64))
        maybe = np.flatnonzero(
            (inside.region == NONE) & (address >= windows.LOWEST) & (address < windows.HIGHEST)
        )
        trace = self.snapshot.trace
        at = self.snapshot.launches[windows.owners(self.snapshot.tables, place[maybe])]
        at = np.where(at < 0, len(trace), at)
        wanted = list(zip(at.tolist(), address[maybe].tolist(), strict=True))
        matches = traces.match_backwards(trace, wanted)
        for i, key in zip(maybe.tolist(), wanted, strict=True):
            if key in matches:
                ordinal, offset, size = matches[key]
                out.region[i], out.offset[i] = self._symbols.add(f"alloc#{ordinal}", size), offset
        return out

    def hits(self, place: Array, address: Array) -> Array:
        """Whether anything at all is known to live at these addresses."""
        known = [r.region != NONE for r in self.readings(place, address)[:2]]
        held: Array = self.driver.inside(address).region != NONE
        live: Array = known[0] | known[1] | held
        return live


def differential(a: Snapshot, b: Snapshot, symbols: Symbols) -> Classified:
    """Classify every word of two structurally equal snapshots. Raises BaseCollision."""
    left, right, pairing = Side(a, symbols), Side(b, symbols), Pairing()
    open_bytes: Array = np.asarray(a.tables.payload != b.tables.payload)
    parts = [_aligned(a, b, left, right, symbols, pairing, open_bytes)]
    count = len(windows.places(a.tables))
    parts.append(_maps(a, b, left, right, open_bytes))
    parts.append(_packed(a, b, left, right, symbols, pairing, open_bytes))
    noise, conflict = _rest(a, b, left, right, open_bytes)
    place, region, offset, kind = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return Classified(place, region, offset, kind, noise, conflict, count, pairing)


Found = tuple[Array, Array, Array, Array]


def _aligned(
    a: Snapshot, b: Snapshot, left: Side, right: Side, symbols: Symbols, pairing: Pairing, open_bytes: Array
) -> Found:
    """Windows at 4-byte stride."""
    at = windows.places(a.tables)
    first, second = windows.values(a.tables.payload, at), windows.values(b.tables.payload, at)
    _check_collision(left, right, first[first == second])
    differs = first != second
    words = Words(at[differs], first[differs], second[differs])
    return _explain(words, left, right, symbols, pairing, open_bytes)


def _packed(
    a: Snapshot, b: Snapshot, left: Side, right: Side, symbols: Symbols, pairing: Pairing, open_bytes: Array
) -> Found:
    """Windows at any byte, for what is still unexplained: packed structs."""
    at = windows.places(a.tables, 1) if open_bytes.any() else np.zeros(0, np.int64)
    at = at[open_bytes[at[:, None] + np.arange(8)].any(1)]
    words = Words(at, windows.values(a.tables.payload, at), windows.values(b.tables.payload, at))
    return _explain(words, left, right, symbols, pairing, open_bytes)


def _explain(
    words: Words, left: Side, right: Side, symbols: Symbols, pairing: Pairing, open_bytes: Array
) -> Found:
    """Proven pointers among the words; their bytes are explained from here on."""
    region, offset = _agree(words, left, right)
    _pair_libraries(words, left, right, symbols, pairing, region, offset)
    chosen = _choose(words.place, region != NONE)
    place = words.place[chosen]
    open_bytes[(place[:, None] + np.arange(8)).ravel()] = False
    return place, region[chosen], offset[chosen], np.full(len(chosen), ABSOLUTE)


def _check_collision(left: Side, right: Side, equal: Array) -> None:
    """A region that did not move makes its pointers look like constants."""
    for one, other, names in (
        (left.named, right.named, [r.symbol for r in left.snapshot.regions]),
        (left.driver, right.driver, ["a library allocation"] * len(left.device)),
    ):
        hit = one.inside(equal)
        same = np.isin(one.base, other.base)
        stuck = (hit.region != NONE) & np.isin(hit.region, one.order[same])
        if stuck.any():
            symbol = names[int(hit.region[int(np.argmax(stuck))])]
            raise BaseCollision(
                f"{symbol} has one address in both captures and parameter words point into it"
            )


def _agree(words: Words, left: Side, right: Side) -> tuple[Array, Array]:
    """The (symbol, offset) that both processes read in a word, or NONE."""
    region, offset = np.full(len(words.place), NONE), np.zeros(len(words.place), np.int64)
    firsts, seconds = left.readings(words.place, words.a), right.readings(words.place, words.b)
    for one in firsts:
        for other in seconds:
            same = (one.region != NONE) & (one.region == other.region) & (one.offset == other.offset)
            fresh = same & (region == NONE)
            region[fresh], offset[fresh] = one.region[fresh], one.offset[fresh]
    return region, offset


def _pair_libraries(
    words: Words, left: Side, right: Side, symbols: Symbols, pairing: Pairing, region: Array, offset: Array
) -> None:
    """Fill in words that only driver allocations explain, in both processes at one offset."""
    one, other = left.driver.inside(words.a), right.driver.inside(words.b)
    both = (region == NONE) & (one.region != NONE) & (other.region != NONE) & (one.offset == other.offset)
    for i in np.flatnonzero(both).tolist():
        mine = left.device[int(one.region[i])]
        number = pairing.number(mine, right.device[int(other.region[i])])
        if number is not None:
            region[i], offset[i] = symbols.add(f"lib:{number}", mine.size), one.offset[i]


def _choose(place: Array, proven: Array) -> Array:
    """Windows that do not overlap; those aligned to 8 first, then to 4, since compilers align pointers."""
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


def _maps(a: Snapshot, b: Snapshot, left: Side, right: Side, open_bytes: Array) -> Found:
    """Tensor maps with unexplained bytes whose decoded addresses agree in both."""
    place, first, second = np.intersect1d(a.maps["place"], b.maps["place"], return_indices=True)
    place = place.astype(np.int64)
    needed = open_bytes[place[:, None] + np.arange(TENSOR_MAP_BYTES)].any(1)
    words = Words(place[needed], a.maps["address"][first[needed]], b.maps["address"][second[needed]])
    region, offset = _agree(words, left, right)
    good = region != NONE
    open_bytes[(words.place[good][:, None] + np.arange(TENSOR_MAP_BYTES)).ravel()] = False
    return words.place[good], region[good], offset[good], np.full(int(good.sum()), TENSOR_MAP)


def _rest(a: Snapshot, b: Snapshot, left: Side, right: Side, open_bytes: Array) -> tuple[Array, Array]:
    """Split unexplained bytes into noise and conflict, as payload positions of bytes."""
    at = windows.places(a.tables, 1) if open_bytes.any() else np.zeros(0, np.int64)
    at = at[open_bytes[at[:, None] + np.arange(8)].any(1)]
    live = left.hits(at, windows.values(a.tables.payload, at)) | right.hits(
        at, windows.values(b.tables.payload, at)
    )
    suspect = np.zeros(len(open_bytes), bool)
    suspect[(at[live][:, None] + np.arange(8)).ravel()] = True
    return np.flatnonzero(open_bytes & ~suspect), np.flatnonzero(open_bytes & suspect)
