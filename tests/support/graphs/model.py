"""A small decoder whose graphs have the parameters that break a naive relocation.

Structs with holes, tensor maps, constants that look like addresses, the end of a table, memory of a library, two kernels of
one name, and addresses in device memory. A model is one process: its memory is nobody else's.
"""

import ctypes
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coldstart.graphs.api import LAUNCH, AllocationEvent, Captured
from coldstart.graphs.cuda.driver import CudaDriver, call
from coldstart.graphs.cuda.modules import ModuleLog
from coldstart.graphs.tables import EDGE, MEMCPY, MEMSET, Array, SymbolRegion
from tests.support.graphs.images import cubin
from tests.support.graphs.library import fake_cuda

VOCABULARY, SLOTS, TABLE, MAGIC = 64, 4, 16, 0x5AFE
# Parameters by the letters of `struct`, or the layout of a struct that is one parameter.
KERNELS: dict[str, str | tuple[tuple[int, int], ...]] = {
    "k_scale": "QQI",
    "k_add": ((0, 32),),
    "k_mapped": ((0, 128), (128, 8), (136, 4)),
    "k_tiles": ((112, 640),),
    "k_gather": "QQQII",
    "k_split": "QQQQI",
    "k_turn": "QQQIIQ",
    "k_store": "QQQII",
    "k_read": "QQQII",
    "k_sum": "QQII",
    "k_twin": "QQI",
}


def layout(name: str) -> tuple[tuple[int, int], ...]:
    """Return offset and size of each parameter."""
    letters = KERNELS[name]
    if not isinstance(letters, str):
        return letters
    ends = [struct.calcsize("<" + letters[:at]) for at in range(len(letters))]
    return tuple((at, struct.calcsize(one)) for at, one in zip(ends, letters, strict=True))


IMAGE = cubin({name: ("double" if name == "k_twin" else name, layout(name)) for name in KERNELS})
OTHER = cubin({"k_twin": ("triple", layout("k_twin"))})


def pack_map(address: int) -> bytes:
    """Return a tensor map, in which the address is rotated and keyed, so that it is no plain pointer."""
    coded = ((address << 13 | address >> 51) & (1 << 64) - 1) ^ 0x5A5A5A5A5A5A5A5A
    return coded.to_bytes(8, "little").ljust(128, b"\1")


def normal(values: np.random.Generator, size: int) -> bytes:
    """Return so many bytes of random floats."""
    return values.standard_normal(size // 4).astype(np.float32).tobytes()


@dataclass(frozen=True)
class Shape:
    """Layers, floats in a row, batch sizes; a graph computes a row for each `divide` requests."""

    name: str
    layers: int
    width: int = 8
    sizes: tuple[int, ...] = (1,)
    divide: int = 8

    def rows(self, size: int) -> int:
        """Return the number of rows that a graph of this batch size computes."""
        return max(1, size // self.divide)


class SimModel:
    """Framework and workload of one process; `seed` decides what is allocated before."""

    def __init__(self, shape: Shape, seed: int, images: Sequence[bytes] = (IMAGE, OTHER)) -> None:
        self.fake, self.shape, self.random = fake_cuda(), shape, random.Random(seed)
        modules = ModuleLog()
        for image in images:
            modules.record(image)
        self.driver = CudaDriver(modules)
        self.libraries = [self.driver.load_library(image) for image in images]
        # Of one function, as a kernel with much shared memory has them.
        self.driver.set_function_attributes(
            self.driver.library_kernel(self.libraries[0], "k_read"), [(8, 100 << 10)]
        )
        self.events, self.reserved, self.segments = list[AllocationEvent](), list[int](), list[SymbolRegion]()
        rows = shape.rows(max(shape.sizes))
        self.bytes = 4 * rows * shape.width
        inputs = {f"static:{name}": 4 * rows for name in ("ids", "positions", "slots", "lengths")}
        weights = {f"param:layers.{i}": self.bytes for i in range(shape.layers)}
        caches = {f"kv:{i}": SLOTS * self.bytes for i in range(shape.layers)}
        parts = {
            "param:embed": 4 * VOCABULARY * shape.width,
            "param:norm": self.bytes,
            "param:head": self.bytes,
        }
        sizes = {**parts, **weights, **inputs, **caches, "static:out": self.bytes}
        self.named = {symbol: SymbolRegion(symbol, n, self.allocate(n)) for symbol, n in sizes.items()}
        values = np.random.default_rng(7)
        for symbol, region in self.named.items():
            held = normal(values, region.size)
            self.driver.write(region.base, held if symbol in {*parts, *weights} else bytes(region.size))
        # Memory without a name: a table of the framework at its second allocation of this size, and that of a library.
        self._note(freed := self.allocate(table := 4 * TABLE * shape.width), table)
        self.events.append(AllocationEvent("free", freed, 0))
        self.rope_table = self.allocate(table)
        self._note(self.rope_table, table)
        self.driver.write(self.rope_table, normal(values, table))
        self.hidden = {"work": self.allocate(8 * shape.width), "semaphore": self.allocate(520)}
        self.driver.write(self.hidden["semaphore"] + 256, MAGIC.to_bytes(4, "little"))

    def allocate(self, size: int) -> int:
        """Return device memory, after memory of a size that only this process has."""
        call(self.driver.d.cuMemAlloc, self.random.randrange(1, 64) * 512)
        return int(call(self.driver.d.cuMemAlloc, size))

    def _note(self, address: int, size: int, *, pool: bool = False) -> None:
        self.events.append(AllocationEvent("alloc", address, size, pool))

    def at(self, symbol: str) -> int:
        """Return the address of named memory."""
        return self.named[symbol].base

    # --- capture: as a stream would record it ---------------------------------------------------------
    def capture(self, key: str) -> Captured:
        graph = self.build(self.sizes[key])
        return Captured(graph, self.driver.instantiate(graph))

    def build(self, size: int) -> int:
        """Build the graph of one decoding step into static:out."""
        graph, rows, width = self.driver.new_graph(), self.shape.rows(size), self.shape.width
        floats = rows * width
        left, right, pointers, hidden, last = self._activations(4 * floats)
        nodes, edges = list[Any](), list[tuple[int, ...]]()

        def add(node: Any, *after: int, kind: int = 0) -> int:
            edges.extend((one, len(nodes), kind, 0, kind, 0) for one in after or range(len(nodes))[-1:])
            nodes.append(node)
            return len(nodes) - 1

        def run(name: str, *values: int, library: int = 0) -> Any:
            return self.launch(graph, name, struct.pack(f"<{KERNELS[name]}", *values), library)

        begin = add(self._set(graph, hidden, 4 * floats))
        add(run("k_gather", self.at("static:ids"), self.at("param:embed"), hidden, rows, width))
        for layer in range(self.shape.layers):
            cache, end = self.at(f"kv:{layer}"), self.rope_table + 4 * TABLE * width
            add(self._weigh(graph, self.at(f"param:layers.{layer}"), hidden, rows, layer))
            positions = self.at("static:positions")
            turned = add(run("k_turn", hidden, positions, self.rope_table, rows, width, end))
            add(run("k_store", hidden, cache, self.at("static:slots"), rows, width), turned, kind=1)
            add(run("k_read", cache, self.at("static:lengths"), hidden, rows, width))
        doubled = add(run("k_twin", hidden, left, floats))
        cleared = add(self._set(graph, right, 4 * floats), begin)
        add(self.copy(graph, left, right, 4 * floats), doubled, cleared)
        add(run("k_sum", pointers, hidden, 2, floats))
        tripled = add(run("k_twin", hidden, last, floats, library=1))
        add(self.driver.add_empty(graph), tripled)
        add(self.launch(graph, "k_tiles", self._tiles(last, floats)))
        end_node = add(run("k_scale", last, self.at("static:out"), floats))
        self.driver.set_attributes(nodes[end_node], ((6, "01"), (8, "02")))
        self.driver.add_edges(graph, nodes, np.array(edges, EDGE))
        return graph

    def _activations(self, size: int) -> tuple[int, ...]:
        """Return two buffers and the array of their addresses, which outlive each graph, and two buffers that do not."""
        places = [0, self.bytes, 2 * self.bytes, 2 * self.bytes + 512, 3 * self.bytes + 512]
        if not self.segments:
            self.segments = [SymbolRegion("pool:0", total := 4 * self.bytes + 512, self.allocate(total))]
            base = self.segments[0].base
            self.driver.write(base + places[2], np.array([base, base + places[1]], np.uint64).tobytes())
            for place, held in zip(places[:3], (self.bytes, self.bytes, 16), strict=True):
                self._note(base + place, held, pool=True)
        found = tuple(self.segments[0].base + place for place in places)
        for address in found[3:]:
            self._note(address, size, pool=True)
        self.events += [AllocationEvent("free", address, size, True) for address in found[3:]]
        return found

    def _weigh(self, graph: int, weight: int, out: int, rows: int, layer: int) -> Any:
        """Add a weight: through a library's memory for few rows, a tensor map for some, and a struct with a hole for many."""
        floats = rows * self.shape.width
        if rows <= 2:
            work, semaphore = self.hidden["work"], self.hidden["semaphore"] + 256
            return self.launch(graph, "k_split", struct.pack("<QQQQI", weight, out, work, semaphore, floats))
        if rows <= 8:
            return self.launch(graph, "k_mapped", pack_map(weight) + struct.pack("<QI", out, floats))
        stale, token = self.random.randrange(1 << 32), 0x7F0000001200 + layer * 512
        return self.launch(graph, "k_add", struct.pack("<QQIIQ", weight, out, floats, stale, token))

    def _tiles(self, out: int, floats: int) -> bytes:
        """112 bytes that no parameter has, then a struct with two maps and noise between them."""
        norm, head = (pack_map(self.at(f"param:{name}")) for name in ("norm", "head"))
        first = struct.pack("<QI", out, floats).ljust(128, b"\0")
        return bytes(112) + (first + norm + self.random.randbytes(128) + head).ljust(640, b"\0")

    def launch(self, graph: int, name: str, payload: bytes, library: int = 0) -> Any:
        """Add a kernel node with these packed parameters."""
        held = ctypes.create_string_buffer(payload, len(payload))
        spans = layout(name if name in KERNELS else "k_scale")
        pointers = np.array([ctypes.addressof(held) + offset for offset, _ in spans], np.uint64)
        row = np.zeros(1, LAUNCH)
        row["function"] = self.driver.library_kernel(self.libraries[library], name)
        row["params"], row["grid"], row["block"] = pointers.ctypes.data, (4, 1, 1), (32, 1, 1)
        return self.driver.add_kernels(graph, row)[0]

    def _set(self, graph: int, target: int, width: int) -> Any:
        return self.driver.add_memset(graph, np.array([(target, 0, 0, 1, width, 1)], MEMSET)[0])

    def copy(self, graph: int, source: int, target: int, width: int) -> Any:
        """Add a memory copy."""
        return self.driver.add_memcpy(graph, np.array([(source, target, width, 1, 1, 0, 0, 0, 0)], MEMCPY)[0])

    # --- framework ------------------------------------------------------------------------------------
    @property
    def sizes(self) -> dict[str, int]:
        return {f"decode:{size}": size for size in self.shape.sizes}

    def regions(self) -> list[SymbolRegion]:
        return list(self.named.values())

    def pool(self) -> list[SymbolRegion]:
        return self.segments

    def reserve(self, sizes: Sequence[int]) -> list[int]:
        self.reserved += (new := [int(call(self.driver.d.cuMemAlloc, size)) for size in sizes])
        return new

    def release(self) -> None:
        while self.reserved:
            call(self.driver.d.cuMemFree, self.driver.d.CUdeviceptr(self.reserved.pop()))

    def trace(self) -> list[AllocationEvent]:
        return self.events

    def consumes_random(self, captured: Captured) -> bool:
        return False

    def stream(self) -> int:
        return 0

    # --- workload -------------------------------------------------------------------------------------
    def prepare(self, key: str, seed: int) -> None:
        values, rows = np.random.default_rng(seed), self.shape.rows(self.sizes[key])
        limits = {"ids": (0, VOCABULARY), "positions": (0, TABLE), "lengths": (1, SLOTS + 1)}
        for name, (low, high) in limits.items():
            self.write(f"static:{name}", values.integers(low, high, rows))
        self.write("static:slots", np.arange(rows) * SLOTS)
        for region in self.named.values():
            if region.symbol.startswith("kv:"):
                self.driver.write(region.base, normal(values, region.size))

    def write(self, symbol: str, values: Array) -> None:
        self.driver.write(self.at(symbol), values.astype(np.int32).tobytes())

    def observe(self, key: str) -> bytes:
        written = 4 * self.shape.rows(self.sizes[key]) * self.shape.width
        spans = [(self.at("static:out"), written)]
        spans += [(r.base, r.size) for s, r in self.named.items() if s.startswith("kv:")]
        return b"".join(self.driver.read(*span) for span in spans)
