"""A Llama-like decoder that launches simulated kernels: weights, buffers, one decoding step."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from coldstart.graphs.api import AllocationEvent, NodeKind
from coldstart.graphs.errors import DriverError
from coldstart.graphs.tables import MEMCPY, MEMSET, SymbolRegion
from tests.support.graphs.allocator import Allocator
from tests.support.graphs.driver import Library, Node, SimDriver
from tests.support.graphs.images import cubin
from tests.support.graphs.kernels import MAGIC, ROUTINES, F, pack_map

VOCABULARY, SLOTS = 64, 4


@dataclass(frozen=True)
class Shape:
    """Layers as published, widths scaled down; `divide` divides the batch sizes (memory, not structure)."""

    name: str
    layers: int
    width: int = 8
    sizes: tuple[int, ...] = (1,)
    divide: int = 8

    def rows(self, size: int) -> int:
        """Return the number of rows that a graph of this batch size computes."""
        return max(1, size // self.divide)


FRAMEWORK_KERNELS = ("embed", "rms_norm", "rope", "store_kv", "paged_attention", "silu_mul", "add")
BLAS_KERNELS = ("gemm", "gemm_split", "gemm_map", "add_pointers")


def libraries() -> tuple[Library, ...]:
    """Two kernels share the name `twin` with different code."""
    own = {f"fw_{n}": (n, ROUTINES[n].layout) for n in FRAMEWORK_KERNELS}
    blas = {f"blas_{n}": (n, ROUTINES[n].layout) for n in BLAS_KERNELS}
    return (
        Library("framework", cubin(own, salt="framework")),
        Library("blas", cubin(blas, salt="blas")),
        Library("twin", cubin({"twin": ("scale", ROUTINES["scale"].layout)})),
        Library("other", cubin({"twin": ("scale_other", ROUTINES["scale_other"].layout)})),
    )


class Decoder:
    """Tensors, allocators and the forward pass of one process. Two seeds are two address spaces."""

    def __init__(
        self, shape: Shape, seed: int, *, driver: SimDriver | None = None, reuse: float = 0.5
    ) -> None:
        self.shape, self.rng = shape, random.Random(seed ^ 0xC01D)
        self.driver = driver or SimDriver(seed, libraries())
        self._trace: list[AllocationEvent] = []
        memory = self.driver.memory
        self.general = Allocator(memory, self.rng, self._trace, segment=1 << 14, reuse=reuse)
        self.private = Allocator(memory, self.rng, self._trace, segment=1 << 15, reuse=1.0, pool=True)
        self._allocator = self.general
        self.named: dict[str, SymbolRegion] = {}
        self.hidden: dict[str, int] = {}
        self._stale = [self.rng.randrange(1 << 32) for _ in range(8)]
        self.reserved: list[int] = []
        self._pairs: dict[str, tuple[int, int, int]] = {}
        self._weights()
        guard = self.general.allocate(64)  # the table's end, which is a parameter, touches no other memory
        self._buffers()
        self.general.free(guard)

    # --- tensors -------------------------------------------------------------------------------------
    def _name(self, symbol: str, size: int) -> int:
        address = self.general.allocate(size)
        self.named[symbol] = SymbolRegion(symbol, size, address)
        return address

    def _weights(self) -> None:
        values = np.random.default_rng(7)
        d = self.shape.width
        shapes = {"embed": (VOCABULARY, d), "head": (d, d), "norm": (d,)}
        for i in range(self.shape.layers):
            per_layer = {
                "in": (d,),
                "post": (d,),
                "q": (d, d),
                "k": (d, d),
                "o": (d, d),
                "up": (d, 2 * d),
                "down": (d, d),
            }
            shapes |= {f"layers.{i}.{name}": shape for name, shape in per_layer.items()}
        for name, shape in shapes.items():
            address = self._name(f"param:{name}", 4 * int(np.prod(shape)))
            self.driver.memory.array(address, F, *shape)[:] = values.standard_normal(shape).astype(F) / F(
                d**0.5
            )
        first = self.general.allocate(VOCABULARY * d * 4)
        self.general.free(first)
        self.rope_table = self.general.allocate(VOCABULARY * d * 4)
        self.driver.memory.array(self.rope_table, F, VOCABULARY, d)[:] = values.standard_normal(
            (VOCABULARY, d)
        )

    def _buffers(self) -> None:
        rows, d = self.shape.rows(max(self.shape.sizes)), self.shape.width
        for name in ("ids", "positions", "slots", "lengths"):
            self._name(f"static:{name}", 4 * rows)
        self._name("static:out", 4 * rows * d)
        for i in range(self.shape.layers):
            self._name(f"kv:{i}", 4 * rows * SLOTS * d)
        for region in self.named.values():
            if region.symbol.startswith(("static:", "kv:")):
                self.driver.fill(region.base, region.size, 0)
        self.driver.memory.array(self._at("static:lengths"), np.int32, rows)[:] = 1

    def _at(self, symbol: str) -> int:
        return self.named[symbol].base

    # --- launching -----------------------------------------------------------------------------------
    def call(self, name: str, *values: object, stream: int = 0, edge: int = 0, head: bytes = b"") -> None:
        """Launch a kernel; holes of by-value structs keep whatever the stack held."""
        kernel = ROUTINES[name]
        payload = bytearray(kernel.fields.pack(*values))
        payload[: len(head)] = head
        self._leave_stale_bytes(name, payload)
        library, prefix = ("blas", "blas_") if name in BLAS_KERNELS else ("framework", "fw_")
        function = self.driver.function(library, prefix + name)
        attributes = ((6, "01000000"),) if edge else ()
        node = Node(NodeKind.KERNEL, bytes(payload), function, (4, 1, 1), (32, 1, 1), 0, attributes)
        self.driver.submit(node, stream, edge)

    def _leave_stale_bytes(self, name: str, payload: bytearray) -> None:
        if name == "gemm":
            payload[36:40] = self._stale[0].to_bytes(4, "little")
        elif name == "add":
            payload[20:24] = self._stale[1].to_bytes(4, "little")

    def _blas(self) -> tuple[int, int]:
        """Allocate the library's workspace and semaphore at its first call, never during capture."""
        if "work" not in self.hidden:
            if self.driver.capturing is not None:
                raise DriverError("cuMemAlloc", "STREAM_CAPTURE_UNSUPPORTED")
            self.hidden = {"work": self.driver.allocate(1 << 14), "semaphore": self.driver.allocate(512)}
            self.driver.memory.array(self.hidden["semaphore"] + 256, np.int32, 1)[:] = MAGIC
        return self.hidden["work"], self.hidden["semaphore"] + 256

    def _gemm(self, x: int, weight: str, out: int, n: int, k: int, c: int, *, stream: int = 0) -> None:
        """Launch the split kernel for small batches, the tensor map for medium ones, and the plain kernel for the rest."""
        if n <= 2 and k % 2 == 0:
            work, semaphore = self._blas()
            self.call("gemm_split", x, self._at(weight), out, work, semaphore, n, k, c, stream=stream)
        elif n <= 8:
            self.call("gemm_map", x, out, n, c, stream=stream, head=pack_map(self._at(weight), k, c))
        else:
            self.call("gemm", x, self._at(weight), out, n, k, c, stream=stream)

    def _new(self, floats: int) -> int:
        return self._allocator.allocate(4 * floats)

    # --- the model -----------------------------------------------------------------------------------
    def forward(self, size: int, layers: int | None = None) -> None:
        """One decoding step of `size` requests into static:out."""
        n, d = self.shape.rows(size), self.shape.width
        self._pair()
        hidden = self._new(n * d)
        self.call("embed", self._at("static:ids"), self._at("param:embed"), hidden, n, d)
        for i in range(self.shape.layers if layers is None else layers):
            self._attention(i, hidden, n)
            self._feed_forward(i, hidden, n)
        self._finish(hidden, n)
        self._allocator.free(hidden)

    def _attention(self, i: int, hidden: int, n: int) -> None:
        d, name = self.shape.width, f"param:layers.{i}."
        normed, q, k, out = (self._new(n * d) for _ in range(4))
        self.call("rms_norm", hidden, self._at(name + "in"), normed, n, d, 1e-5)
        self.driver.wait(1, 0)
        self._gemm(normed, name + "q", q, n, d, d)
        self._gemm(normed, name + "k", k, n, d, d, stream=0 if n <= 2 else 1)
        end = self.rope_table + VOCABULARY * d * 4
        self.call("rope", q, self._at("static:positions"), self.rope_table, n, d, end)
        self.driver.wait(1, 0)
        slots, positions = self._at("static:slots"), self._at("static:positions")
        self.call("store_kv", k, self._at(f"kv:{i}"), slots, positions, n, d, stream=1)
        self.driver.wait(0, 1)
        self.call("paged_attention", q, self._at(f"kv:{i}"), self._at("static:lengths"), out, n, d, SLOTS)
        self._gemm(out, name + "o", normed, n, d, d)
        self.call("add", normed, hidden, n * d, 0x7F0000001200 + i * 512, edge=1)
        for block in (normed, q, k, out):
            self._allocator.free(block)

    def _feed_forward(self, i: int, hidden: int, n: int) -> None:
        d, name = self.shape.width, f"param:layers.{i}."
        normed, up = self._new(n * d), self._new(2 * n * d)
        self.call("rms_norm", hidden, self._at(name + "post"), normed, n, d, 1e-5)
        self._gemm(normed, name + "up", up, n, d, 2 * d)
        self._allocator.free(normed)
        mixed = self._new(n * d)
        self.call("silu_mul", up, mixed, n, d)
        self._gemm(mixed, name + "down", up, n, d, d)
        self.call("add", up, hidden, n * d, 512 * i)
        self._allocator.free(up)
        self._allocator.free(mixed)

    def _finish(self, hidden: int, n: int) -> None:
        d = self.shape.width
        left, right, pointers = self._pair()
        self.call("rms_norm", hidden, self._at("param:norm"), left, n, d, 1e-5)
        self._set(right, 4 * n * d)
        self._copy(left, right, 4 * d)
        self.call("add_pointers", pointers, hidden, 2, n * d)
        self._gemm(hidden, "param:head", self._at("static:out"), n, d, d)

    def _pair(self) -> tuple[int, int, int]:
        """Two buffers and an array of their addresses, written by the host once for each allocator.

        No kernel writes the array, so a graph's pool holds permanent contents that are addresses.
        """
        owner = "private" if self._allocator is self.private else "general"
        if owner not in self._pairs:
            floats = self.shape.rows(max(self.shape.sizes)) * self.shape.width
            left, right, pointers = self._new(floats), self._new(floats), self._allocator.allocate(16)
            self.driver.memory.array(pointers, np.uint64, 2)[:] = (left, right)
            self._pairs[owner] = (left, right, pointers)
        return self._pairs[owner]

    def _set(self, target: int, width: int) -> None:
        row = np.zeros(1, MEMSET)
        row["target"], row["element"], row["width"], row["height"] = target, 1, width, 1
        self.driver.submit(Node(NodeKind.MEMSET, row.tobytes()))

    def _copy(self, source: int, target: int, width: int) -> None:
        row = np.zeros(1, MEMCPY)
        row["source"], row["target"], row["width"], row["height"], row["depth"] = source, target, width, 1, 1
        self.driver.submit(Node(NodeKind.MEMCPY, row.tobytes()))
