"""Device memory as host memory: random bases, freed memory poisoned and unmapped, every access checked."""

from __future__ import annotations

import bisect
import math
import random
from typing import Any

import numpy as np

from coldstart.graphs.errors import GraphError
from coldstart.graphs.tables import DEVICE, HOST, Array, SymbolRegion

LOW, HIGH, ALIGN = 0x7F0000000000, 0x7FF000000000, 512
POISON = 0xFF


class Fault(GraphError):
    """Access outside of allocated memory."""

    code = "CS-SIM-FAULT"


class Memory:
    """Driver allocations of one process."""

    def __init__(self, rng: random.Random, *, fixed: bool = False) -> None:
        self._rng, self._fixed, self._next = rng, fixed, LOW
        self._bases: list[int] = []
        self._buffers: dict[int, Array] = {}
        self.host: set[int] = set()

    def allocate(self, size: int, *, host: bool = False) -> int:
        """Allocate `size` poisoned bytes and return their base; `host` marks pinned host memory."""
        base = self._place(size)
        bisect.insort(self._bases, base)
        self._buffers[base] = np.full(size, POISON, dtype=np.uint8)
        if host:
            self.host.add(base)
        return base

    def _place(self, size: int) -> int:
        if self._fixed:
            base, self._next = self._next, self._next + (size + ALIGN) // ALIGN * ALIGN + ALIGN
            return base
        while True:
            base = self._rng.randrange(LOW, HIGH, ALIGN)
            if self.range(base) is None and self.range(base + size) is None and not self._between(base, size):
                return base

    def _between(self, base: int, size: int) -> bool:
        at = bisect.bisect_left(self._bases, base)
        return at < len(self._bases) and self._bases[at] < base + size

    def free(self, base: int) -> None:
        """Unmap an allocation; raises Fault for an address that is not a base."""
        if base not in self._buffers:
            raise Fault(f"free of {base:#x}, which is not an allocation")
        self._buffers.pop(base)[:] = POISON
        self._bases.remove(base)
        self.host.discard(base)

    def range(self, address: int) -> SymbolRegion | None:
        """Return the allocation that contains this address."""
        at = bisect.bisect_right(self._bases, address) - 1
        if at < 0:
            return None
        base = self._bases[at]
        size = len(self._buffers[base])
        symbol = HOST if base in self.host else DEVICE
        return SymbolRegion(symbol, size, base) if address < base + size else None

    def view(self, address: int, size: int) -> Array:
        """Return a view of `size` bytes; raises Fault if any of them is not mapped."""
        at = bisect.bisect_right(self._bases, address) - 1
        if at >= 0:
            buffer = self._buffers[self._bases[at]]
            start = address - self._bases[at]
            if start + size <= len(buffer):
                return buffer[start : start + size]
        raise Fault(f"access to {size} bytes at {address:#x}, which is not mapped")

    def array(self, address: int, dtype: Any, *shape: int) -> Array:
        """Return a typed view."""
        count = math.prod(shape)
        kind = np.dtype(dtype)
        view: Array = self.view(address, count * kind.itemsize).view(kind)
        return view.reshape(shape)
