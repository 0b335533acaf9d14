"""A caching allocator: segments from the driver, blocks split from them, freed blocks used again."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from coldstart.graphs.api import AllocationEvent
from coldstart.graphs.tables import SymbolRegion
from tests.support.graphs.memory import Memory

GRAIN = 512


@dataclass
class Segment:
    """One driver allocation; `free` are (offset, size) holes."""

    base: int
    size: int
    free: list[tuple[int, int]] = field(default_factory=list)


class Allocator:
    """`reuse` is the chance that a fitting hole is taken: below 1 the address pattern differs by process."""

    def __init__(
        self,
        memory: Memory,
        rng: random.Random,
        trace: list[AllocationEvent],
        *,
        segment: int,
        reuse: float,
        pool: bool = False,
    ) -> None:
        self._memory, self._rng, self._trace = memory, rng, trace
        self._segment, self._reuse, self._pool = segment, reuse, pool
        self.segments: list[Segment] = []
        self._held: dict[int, tuple[int, Segment]] = {}

    def allocate(self, size: int) -> int:
        """Address of a block of at least `size` bytes."""
        rounded = (size + GRAIN - 1) // GRAIN * GRAIN
        found = self._from_holes(rounded) if self._rng.random() < self._reuse else None
        address, segment = found or self._from_new(rounded)
        self._held[address] = rounded, segment
        self._trace.append(AllocationEvent("alloc", address, size, self._pool))
        return address

    def _from_holes(self, size: int) -> tuple[int, Segment] | None:
        for segment in self.segments:
            for i, (offset, room) in enumerate(segment.free):
                if room >= size:
                    segment.free[i : i + 1] = [(offset + size, room - size)] if room > size else []
                    return segment.base + offset, segment
        return None

    def _from_new(self, size: int) -> tuple[int, Segment]:
        total = max(size, self._segment)
        base = self._memory.allocate(total)
        self.segments.append(Segment(base, total, [(size, total - size)] if total > size else []))
        return base, self.segments[-1]

    def free(self, address: int) -> None:
        """Free the block; the segment stays mapped."""
        size, owner = self._held.pop(address)
        owner.free.append((address - owner.base, size))
        self._merge(owner)
        self._trace.append(AllocationEvent("free", address, size, self._pool))

    @staticmethod
    def _merge(segment: Segment) -> None:
        merged: list[tuple[int, int]] = []
        for offset, size in sorted(segment.free):
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        segment.free = merged

    def regions(self) -> list[SymbolRegion]:
        """Return the segments as pool symbols."""
        return [SymbolRegion(f"pool:{i}", s.size, s.base) for i, s in enumerate(self.segments)]
