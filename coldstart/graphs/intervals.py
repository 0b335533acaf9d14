"""Intervals of live memory, and the symbols of an address.

An address is inside [base, base + size) of at most one region and may be one past the end of another. Both
readings are retained until a second layout decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coldstart.graphs.errors import GraphError
from coldstart.graphs.tables import Array, SymbolRegion

NONE = -1


@dataclass
class Reading:
    """Region number (or NONE) and offset in bytes for each address."""

    region: Array
    offset: Array


class Intervals:
    """Sorted, disjoint regions of one process."""

    def __init__(self, regions: Sequence[SymbolRegion]) -> None:
        self.order = np.argsort([r.base for r in regions], kind="stable").astype(np.int64)
        self.base = np.array([regions[i].base for i in self.order], np.uint64)
        self.size = np.array([regions[i].size for i in self.order], np.uint64)
        overlap = self.base[:-1] + self.size[:-1] > self.base[1:]
        if overlap.any():
            first = regions[self.order[int(np.argmax(overlap))]]
            raise GraphError(f"region {first.symbol} overlaps the next region; symbols must not alias")

    def inside(self, addresses: Array) -> Reading:
        """Return the regions with base <= address < base + size."""
        at = np.searchsorted(self.base, addresses, side="right") - 1
        return self._reading(addresses, at, lambda distance, size: distance < size)

    def past_end(self, addresses: Array) -> Reading:
        """Return the regions with address == base + size."""
        at = np.searchsorted(self.base, addresses, side="left") - 1
        return self._reading(addresses, at, lambda distance, size: distance == size)

    def _reading(self, addresses: Array, at: Array, test: object) -> Reading:
        if not len(self.base):
            return Reading(np.full(len(addresses), NONE), np.zeros(len(addresses), np.int64))
        safe = np.maximum(at, 0)
        distance = addresses - self.base[safe]
        hit = (at >= 0) & test(distance, self.size[safe])  # type: ignore[operator]
        return Reading(np.where(hit, self.order[safe], NONE), np.where(hit, distance, 0).astype(np.int64))
