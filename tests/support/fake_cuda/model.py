"""A framework over the fake driver: three graphs with a struct, a tensor map, copies, edge data, a hole."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence

import numpy as np

from coldstart.graphs.api import LAUNCH, AllocationEvent, Captured
from coldstart.graphs.cuda.driver import CudaDriver, call
from coldstart.graphs.cuda.modules import ModuleLog
from coldstart.graphs.tables import EDGE, MEMCPY, MEMSET, Array, SymbolRegion
from tests.support.graphs.images import cubin
from tests.support.graphs.kernels import pack_map

ROWS = 64
LAYOUTS = {
    "k_scale": ((0, 8), (8, 8), (16, 4)),
    "k_add": ((0, 32),),
    "k_mapped": ((0, 128), (128, 8), (136, 4)),
    "k_tiles": ((112, 640),),
}
IMAGE = cubin({name: (name, layout) for name, layout in LAYOUTS.items()})
NAMED = {"static:x": 4 * ROWS, "static:out": 4 * ROWS, "param:w": 4 * ROWS, "kv:0": 8 * ROWS}
POOL = 4096


class FakeModel:
    """Framework and workload; `seed` decides how much is allocated before, hence the addresses."""

    def __init__(self, seed: int) -> None:
        modules = ModuleLog()
        modules.see(IMAGE)
        self.driver, self.random = CudaDriver(modules), random.Random(seed)
        self.named: dict[str, SymbolRegion] = {}
        for symbol, size in NAMED.items():
            self.allocate(self.random.randrange(1, 64) * 512)
            self.named[symbol] = SymbolRegion(symbol, size, self.allocate(size))
            self.driver.fill(self.named[symbol].base, size, 0)
        self.write("param:w", np.arange(ROWS, dtype=np.float32))
        self.library = self.driver.load_library(IMAGE)
        self.functions = {name: self.driver.library_kernel(self.library, name) for name in LAYOUTS}
        self.segments: list[SymbolRegion] = []
        self.reserved: list[int] = []

    def write(self, symbol: str, values: Array) -> None:
        self.driver.write(self.named[symbol].base, values.tobytes())

    def base_address(self, symbol: str) -> int:
        return self.named[symbol].base

    def allocate(self, size: int) -> int:
        return int(call(self.driver.d.cuMemAlloc, size))

    def free(self, address: int) -> None:
        call(self.driver.d.cuMemFree, self.driver.d.CUdeviceptr(address))

    # --- capture: as a stream would record it ---------------------------------------------------------
    def capture(self, key: str) -> Captured:
        if not self.segments:
            self.segments = [SymbolRegion("pool:0", POOL, self.allocate(POOL))]
        n, pool = self.sizes()[key], self.segments[0].base
        graph = self.driver.new_graph()
        stale = self.random.randrange(1 << 32)
        struct = np.array(
            [self.base_address("static:x"), pool, stale << 32 | n, 0x7F0000000400], np.uint64
        ).tobytes()
        nodes = [
            self._set(graph, pool, 4 * n),
            self._launch(graph, "k_add", struct),
            self._launch(graph, "k_scale", _pack(pool, pool + 2048, n)),
            self._launch(graph, "k_mapped", pack_map(self.base_address("param:w"), n, 1) + _pack(pool, n)),
            self.driver.add_empty(graph),
            self._copy(graph, pool + 2048, self.base_address("static:out"), 4 * n),
            self._launch(graph, "k_scale", _pack(pool, self.base_address("kv:0") + 4 * ROWS, n)),
            self._launch(graph, "k_tiles", self._tiles(self.base_address("kv:0") + 4 * ROWS, n)),
        ]
        self.driver.set_attributes(nodes[2], ((6, "01"), (8, "02")))
        edges = [
            (0, 1, 0, 0, 0),
            (1, 2, 1, 0, 1),
            (2, 3, 0, 0, 0),
            (2, 4, 0, 0, 0),
            (4, 5, 0, 0, 0),
            (3, 6, 0, 0, 0),
            (6, 7, 2, 0, 1),
        ]
        self.driver.add_edges(graph, nodes, np.array([(*e, 0) for e in edges], EDGE))
        return Captured(graph, self.driver.instantiate(graph))

    def _tiles(self, out: int, n: int) -> bytes:
        """112 bytes that no parameter has, then a struct with two maps and noise between them."""
        noise = self.random.randbytes(128)
        maps = [pack_map(self.base_address(symbol), n, 1) for symbol in ("static:x", "param:w")]
        return bytes(112) + (_pack(out, n).ljust(128, b"\0") + maps[0] + noise + maps[1]).ljust(640, b"\0")

    def _launch(self, graph: int, name: str, payload: bytes) -> object:
        held = ctypes.create_string_buffer(payload, len(payload))
        pointers = np.array([ctypes.addressof(held) + offset for offset, _ in LAYOUTS[name]], np.uint64)
        row = np.zeros(1, LAUNCH)
        row["function"], row["params"] = self.functions[name], pointers.ctypes.data
        row["grid"], row["block"] = 1, 32
        return self.driver.add_kernels(graph, row)[0]

    def _set(self, graph: int, target: int, width: int) -> object:
        return self.driver.add_memset(graph, np.array([(target, 0, 0, 1, width, 1)], MEMSET)[0])

    def _copy(self, graph: int, source: int, target: int, width: int) -> object:
        return self.driver.add_memcpy(graph, np.array([(source, target, width, 1, 1, 0, 0, 0, 0)], MEMCPY)[0])

    # --- framework ------------------------------------------------------------------------------------
    def sizes(self) -> dict[str, int]:
        return {"decode:4": 4, "decode:16": 16, "decode:64": 64}

    def regions(self) -> list[SymbolRegion]:
        return list(self.named.values())

    def pool(self) -> list[SymbolRegion]:
        return self.segments

    def reserve(self, sizes: Sequence[int]) -> list[int]:
        self.reserved += (new := [self.allocate(size) for size in sizes])
        return new

    def release(self) -> None:
        while self.reserved:
            self.free(self.reserved.pop())

    def trace(self) -> list[AllocationEvent]:
        """One allocation for each buffer of a graph."""
        spans = [(at, POOL // 2) for s in self.segments for at in (s.base, s.base + POOL // 2)]
        return [AllocationEvent(kind, a, n, pool=True) for a, n in spans for kind in ("alloc", "free")]

    def consumes_random(self, captured: Captured) -> bool:
        return False

    def stream(self) -> int:
        return 0

    # --- workload -------------------------------------------------------------------------------------
    def prepare(self, key: str, seed: int) -> None:
        values = np.random.default_rng(seed)
        self.write("static:x", values.standard_normal(ROWS).astype(np.float32))
        self.write("kv:0", values.standard_normal(2 * ROWS).astype(np.float32))
        self.driver.fill(self.base_address("static:out"), 4 * ROWS, 0)

    def observe(self, key: str) -> bytes:
        return b"".join(self.driver.read(self.base_address(s), NAMED[s]) for s in ("static:out", "kv:0"))


def _pack(*values: int) -> bytes:
    *wide, last = values
    return np.array(wide, np.uint64).tobytes() + np.uint32(last).tobytes()
