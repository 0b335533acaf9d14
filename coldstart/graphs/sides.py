"""Readings of an address in one process: a symbol and an offset."""

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
    """All symbols of a bundle, and their numbers."""

    regions: list[SymbolRegion]
    number: dict[str, int] = field(default_factory=dict)

    def add(self, symbol: str, size: int) -> int:
        """Return the number of a symbol, assigned at its first use."""
        if symbol not in self.number:
            self.number[symbol] = len(self.regions)
            self.regions.append(SymbolRegion(symbol, size))
        return self.number[symbol]


@dataclass
class Words:
    """Words that differ, as aligned arrays: place, and the value in each process."""

    place: Array
    a: Array
    b: Array


@dataclass
class Pairing:
    """Pairs of driver allocations that no tensor reaches (lib:n), matched one to one by equal offset and size."""

    mine: list[SymbolRegion] = field(default_factory=list)
    theirs: list[SymbolRegion] = field(default_factory=list)

    def number(self, one: SymbolRegion, other: SymbolRegion) -> int | None:
        """Return n of lib:n; None if either is paired with another allocation or their sizes differ."""
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
    """Map from addresses in one of two compared snapshots to symbol numbers that both snapshots share."""

    def __init__(self, snapshot: Snapshot, symbols: Symbols) -> None:
        self.snapshot, self._symbols = snapshot, symbols
        self.named = Intervals(snapshot.regions)
        self._numbers = np.array([*(self._number(r) for r in snapshot.regions), NONE])
        mapped = [SymbolRegion("", r.size, r.base) for r in snapshot.ranges if not r.host]
        self.mapped = Intervals(mapped)
        self.device = library_ranges(mapped, snapshot.regions, snapshot.trace)
        self.driver = Intervals(self.device)

    def _number(self, region: SymbolRegion) -> int:
        """Return the symbol's number; NONE if the other process has the symbol with another size."""
        number = self._symbols.add(region.symbol, region.size)
        return number if self._symbols.regions[number].size == region.size else NONE

    def plain(self, address: Array) -> Reading:
        """Return readings in named regions only."""
        return self._named(self.named.inside(address))

    def _named(self, reading: Reading) -> Reading:
        return Reading(self._numbers[reading.region], reading.offset)

    def readings(self, address: Array) -> list[Reading]:
        """Return four readings in order of trust.

        They are: inside a region, inside a traced allocation, one past the end of a region, one past the end
        of an allocation.
        """
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

    def describe(self, address: int) -> str:
        """Return the address, with the symbol and offset that contain it or else the nearest region below."""
        at = np.array([address], np.uint64)
        for reading in self.readings(at)[:2]:
            if (number := int(reading.region[0])) != NONE:
                return f"{address:#x} ({self._symbols.regions[number].symbol}+{int(reading.offset[0])})"
        below = [r for r in self.snapshot.regions if r.base <= address]
        nearest = max(below, key=lambda r: r.base, default=None)
        return f"{address:#x} ({f'{address - nearest.base} bytes after {nearest.symbol}' if nearest else 'below all regions'})"

    def hits(self, address: Array) -> Array:
        """Return whether any known live memory is at these addresses."""
        known = [r.region != NONE for r in self.readings(address)[:2]]
        held: Array = self.mapped.inside(address).region != NONE
        live: Array = known[0] | known[1] | held
        return live


def library_ranges(
    mapped: Sequence[SymbolRegion], regions: Sequence[SymbolRegion], trace: Array
) -> list[SymbolRegion]:
    """Return the driver allocations that contain no named region and no traced block."""
    blocks = trace["address"][trace["kind"] == 0]
    carved = np.concatenate([np.array([r.base for r in regions], np.uint64), blocks])
    holder = Intervals(mapped).inside(carved).region
    return [r for i, r in enumerate(mapped) if i not in set(holder.tolist())]
