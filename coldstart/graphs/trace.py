"""Trace-based indirect index pointers (section 4.1): match an address backwards from its launch.

Allocation number i of the trace is the symbol alloc#i.  The first match backwards is the allocation that is
live at the launch, so an address that was freed and given out again names the later allocation (Figure 6).
Addresses inside the block match as well (interior pointers), and one past its end.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

import numpy as np

from coldstart.graphs.api import AllocationEvent
from coldstart.graphs.tables import Array

TRACE = np.dtype([("kind", "u1"), ("address", "<u8"), ("size", "<u8")])
_KINDS = ("alloc", "free", "launch")
Match = tuple[int, int, int]  # ordinal, offset, size
Matches = tuple[Match | None, Match | None]  # inside a block, one past the end of a block


def pack(events: Sequence[AllocationEvent]) -> Array:
    """Events as rows."""
    return np.array([(_KINDS.index(e.kind), e.address, e.size) for e in events], TRACE)


class Live:
    """The allocations that are live at one point of the trace."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._blocks: dict[int, tuple[int, int]] = {}

    def apply(self, kind: int, address: int, size: int, ordinal: int) -> None:
        """One event of the trace."""
        if kind == 0:
            if address not in self._blocks:
                bisect.insort(self._bases, address)
            self._blocks[address] = (ordinal, size)
        elif kind == 1 and address in self._blocks:
            del self._blocks[address]
            self._bases.remove(address)

    def match(self, address: int) -> Matches:
        """The block that holds the address, and the block that ends there."""
        holder = self._near(bisect.bisect_right(self._bases, address) - 1, address)
        ender = self._near(bisect.bisect_left(self._bases, address) - 1, address)
        inside = holder if holder is not None and holder[1] < holder[2] else None
        return inside, ender if ender is not None and ender[1] == ender[2] else None

    def _near(self, at: int, address: int) -> Match | None:
        if at < 0:
            return None
        ordinal, size = self._blocks[self._bases[at]]
        return ordinal, address - self._bases[at], size


def match_backwards(trace: Array, wanted: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Matches]:
    """`wanted` are (place of the launch in the trace, address); a negative place means its end."""
    end = len(trace)
    by_place: dict[int, set[int]] = {}
    for place, address in wanted:
        by_place.setdefault(place if place >= 0 else end, set()).add(address)
    live, ordinal, matched, events = Live(), 0, {}, trace.tolist()
    for at in range(end + 1):
        for address in by_place.get(at, ()):
            matches = live.match(address)
            if any(matches):
                matched[at, address] = matches
        if at < end:
            kind, base, size = events[at]
            live.apply(kind, base, size, ordinal)
            ordinal += kind == 0
    return matched


def live_blocks(trace: Array) -> dict[int, tuple[int, int]]:
    """Ordinal to (address, size) of every allocation that is live at the end of the trace."""
    live: dict[int, tuple[int, int, int]] = {}
    ordinal = 0
    for kind, base, size in trace.tolist():
        if kind == 0:
            live[base] = (ordinal, base, size)
            ordinal += 1
        elif kind == 1:
            live.pop(base, None)
    return {number: (base, size) for number, base, size in live.values()}


def live_allocation(events: Sequence[AllocationEvent], ordinal: int) -> tuple[int, int] | None:
    """(address, size) of allocation `ordinal` if it is still live at the end of the trace."""
    count, allocation = -1, None
    for event in events:
        count += event.kind == "alloc"
        if event.kind == "alloc" and count == ordinal:
            allocation = (event.address, event.size)
        elif event.kind == "free" and allocation is not None and event.address == allocation[0]:
            return None
    return allocation
