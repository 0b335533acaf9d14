"""How one process reads an address: which symbol, at which offset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from coldstart.graphs import trace as traces
from coldstart.graphs import windows
from coldstart.graphs.intervals import NONE, Intervals, Reading
from coldstart.graphs.snapshot import Snapshot
from coldstart.graphs.tables import Array, SymbolRegion


@dataclass
class Symbols:
    """All symbols of a bundle, and for each process where they are."""

    regions: list[SymbolRegion]
    number: dict[str, int] = field(default_factory=dict)

    def add(self, symbol: str, size: int) -> int:
        """The number of a symbol, made at first use."""
        if symbol not in self.number:
            self.number[symbol] = len(self.regions)
            self.regions.append(SymbolRegion(symbol, size))
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

    mine: list[SymbolRegion] = field(default_factory=list)
    theirs: list[SymbolRegion] = field(default_factory=list)

    def number(self, one: SymbolRegion, other: SymbolRegion) -> int | None:
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


class Side:
    """How one snapshot reads addresses, in shared symbol numbers."""

    def __init__(self, snapshot: Snapshot, symbols: Symbols) -> None:
        self.snapshot, self._symbols = snapshot, symbols
        self.named = Intervals(snapshot.regions)
        self._numbers = np.array([*(self._number(r) for r in snapshot.regions), NONE])
        mapped = [SymbolRegion("", r.size, r.base) for r in snapshot.ranges if not r.host]
        self.mapped = Intervals(mapped)
        self.device = library_ranges(mapped, snapshot.regions, snapshot.trace)
        self.driver = Intervals(self.device)

    def _number(self, region: SymbolRegion) -> int:
        """NONE for a symbol that the other process holds with another size."""
        number = self._symbols.add(region.symbol, region.size)
        return number if self._symbols.regions[number].size == region.size else NONE

    def plain(self, address: Array) -> Reading:
        """Named regions only, by any number of the shared symbols."""
        return self._named(self.named.inside(address))

    def _named(self, reading: Reading) -> Reading:
        return Reading(self._numbers[reading.region], reading.offset)

    def readings(self, address: Array) -> list[Reading]:
        """Inside a region, inside a traced allocation, one past the end of either: in order of trust."""
        inside, past = self.named.inside(address), self.named.past_end(address)
        traced, traced_end = self._traced(address)
        return [self._named(inside), traced, self._named(past), traced_end]

    def _traced(self, address: Array) -> tuple[Reading, Reading]:
        out = [Reading(np.full(len(address), NONE), np.zeros(len(address), np.int64)) for _ in range(2)]
        maybe = np.flatnonzero((address >= windows.LOWEST) & (address < windows.HIGHEST))
        wanted = address[maybe].tolist()
        matches = traces.match_live(self.snapshot.trace, wanted)
        for i, one in zip(maybe.tolist(), wanted, strict=True):
            for reading, match in zip(out, matches.get(one, (None, None)), strict=True):
                if match is not None:
                    reading.region[i] = self._symbols.add(f"alloc#{match[0]}", match[2])
                    reading.offset[i] = match[1]
        return out[0], out[1]

    def hits(self, address: Array) -> Array:
        """Whether anything at all is known to live at these addresses."""
        known = [r.region != NONE for r in self.readings(address)[:2]]
        held: Array = self.mapped.inside(address).region != NONE
        live: Array = known[0] | known[1] | held
        return live


def library_ranges(
    mapped: Sequence[SymbolRegion], regions: Sequence[SymbolRegion], trace: Array
) -> list[SymbolRegion]:
    """Driver allocations that the framework does not carve up: no name and no traced block lies inside."""
    blocks = trace["address"][trace["kind"] == 0]
    carved = np.concatenate([np.array([r.base for r in regions], np.uint64), blocks])
    holder = Intervals(mapped).inside(carved).region
    return [r for i, r in enumerate(mapped) if i not in set(holder.tolist())]
