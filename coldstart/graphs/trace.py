"""Indirect index pointers by trace (section 4.1): match an address with the allocations that are live after capture.

Allocation number i of the trace is the symbol alloc#i. An address that was freed and allocated again refers
to the later allocation (Figure 6), because PyTorch records no launches and memory that a graph reads must
outlive its capture. Addresses inside a block (interior pointers) and one past its end match too.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

import numpy as np

from coldstart.graphs.api import AllocationEvent
from coldstart.graphs.tables import Array

TRACE = np.dtype([("kind", "u1"), ("address", "<u8"), ("size", "<u8")])
_KINDS = ("alloc", "free")
Match = tuple[int, int, int]  # ordinal, offset, size
Matches = tuple[Match | None, Match | None]  # inside a block, one past the end of a block


def pack(events: Sequence[AllocationEvent]) -> Array:
    """Return the events as rows."""
    return np.array([(_KINDS.index(e.kind), e.address, e.size) for e in events], TRACE)


class Live:
    """Allocations that are live at the end of the trace."""

    def __init__(self, trace: Array) -> None:
        self._blocks = sorted((base, i, size) for i, (base, size) in live_blocks(trace).items())
        self._bases = [base for base, _, _ in self._blocks]

    def match(self, address: int) -> Matches:
        """Return the block that contains the address, and the block that ends there."""
        holder = self._near(bisect.bisect_right(self._bases, address) - 1, address)
        ender = self._near(bisect.bisect_left(self._bases, address) - 1, address)
        inside = holder if holder is not None and holder[1] < holder[2] else None
        return inside, ender if ender is not None and ender[1] == ender[2] else None

    def _near(self, at: int, address: int) -> Match | None:
        if at < 0:
            return None
        base, ordinal, size = self._blocks[at]
        return ordinal, address - base, size


def match_live(trace: Array, addresses: Iterable[int]) -> dict[int, Matches]:
    """Return the live blocks at each address; an address without a block has no entry."""
    live = Live(trace)
    matched = {address: live.match(address) for address in set(addresses)}
    return {address: matches for address, matches in matched.items() if any(matches)}


def live_blocks(trace: Array) -> dict[int, tuple[int, int]]:
    """Return (address, size) by number for every allocation that is live at the end of the trace."""
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
    """Return (address, size) of allocation `ordinal` if it is live at the end of the trace, else None."""
    count, allocation = -1, None
    for event in events:
        count += event.kind == "alloc"
        if event.kind == "alloc" and count == ordinal:
            allocation = (event.address, event.size)
        elif event.kind == "free" and allocation is not None and event.address == allocation[0]:
            return None
    return allocation
