"""Framework and workload over the simulated decoder: one process of a serving engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coldstart.graphs.api import AllocationEvent, Captured
from coldstart.graphs.tables import SymbolRegion
from tests.support.graphs.decoder import SLOTS, VOCABULARY, Decoder, Shape, libraries
from tests.support.graphs.kernels import F

__all__ = ["Shape", "SimModel", "libraries"]


class SimModel(Decoder):
    """Names its memory, captures, and gives seeded inputs and outputs."""

    # --- framework -----------------------------------------------------------------------------------
    def sizes(self) -> dict[str, int]:
        return {f"decode:{size}": size for size in self.shape.sizes}

    def regions(self) -> list[SymbolRegion]:
        return list(self.named.values())

    def pool(self) -> list[SymbolRegion]:
        return self.private.regions()

    def reserve(self, sizes: Sequence[int]) -> list[int]:
        self.reserved += (new := [self.driver.allocate(size) for size in sizes])
        return new

    def release(self) -> None:
        while self.reserved:
            self.driver.free(self.reserved.pop())

    def trace(self) -> list[AllocationEvent]:
        return self._trace

    def capture(self, key: str) -> Captured:
        """Warm up, then record, as an engine does."""
        size = self.sizes()[key]
        self.forward(size)
        self._allocator = self.private
        self.driver.begin_capture()
        try:
            self.forward(size)
        finally:
            graph = self.driver.end_capture()
            self._allocator = self.general
        return Captured(graph, self.driver.instantiate(graph))

    def consumes_random(self, captured: Captured) -> bool:
        return False

    def stream(self) -> int:
        return 0

    # --- workload ------------------------------------------------------------------------------------
    def prepare(self, key: str, seed: int) -> None:
        values = np.random.default_rng(seed)
        n = self.shape.rows(self.sizes()[key])
        ints = {"ids": (0, VOCABULARY), "positions": (0, VOCABULARY), "lengths": (1, SLOTS + 1)}
        for name, (low, high) in ints.items():
            self.driver.memory.array(self._at(f"static:{name}"), np.int32, n)[:] = values.integers(
                low, high, n
            )
        self.driver.memory.array(self._at("static:slots"), np.int32, n)[:] = np.arange(n) * SLOTS
        for i in range(self.shape.layers):
            region = self.named[f"kv:{i}"]
            cache = self.driver.memory.array(region.base, F, region.size // 4)
            cache[:] = values.standard_normal(len(cache)).astype(F)

    def observe(self, key: str) -> bytes:
        caches = b"".join(
            self.driver.read(self._at(f"kv:{i}"), self.named[f"kv:{i}"].size)
            for i in range(self.shape.layers)
        )
        return (
            self.driver.read(
                self._at("static:out"), self.shape.rows(self.sizes()[key]) * self.shape.width * 4
            )
            + caches
        )

    def eager(self, key: str) -> None:
        self.forward(self.sizes()[key])
