"""Protocols that separate this package from the CUDA driver, from the framework, and from their test doubles.

Handles and addresses are integers. This module names no torch or CUDA types. A driver call that fails raises
DriverError, after which the caller captures the graph normally.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import numpy as np

from coldstart.graphs.tables import Array, Attributes, Kernel, SymbolRegion


class NodeKind(IntEnum):
    """Values of CUgraphNodeType."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2
    HOST = 3
    CHILD = 4
    EMPTY = 5
    WAIT_EVENT = 6
    RECORD_EVENT = 7
    SEMAPHORE_SIGNAL = 8
    SEMAPHORE_WAIT = 9
    ALLOC = 10
    FREE = 11
    BATCH = 12
    CONDITIONAL = 13


Handle = Any  # a node of a graph under construction, in the backend's own type

# Byte layout of CUDA_KERNEL_NODE_PARAMS_v2: the driver receives one row.
LAUNCH = np.dtype(
    {
        "names": ["function", "grid", "block", "shared", "params", "extra", "kernel", "context"],
        "formats": ["<u8", ("<u4", 3), ("<u4", 3), "<u4", "<u8", "<u8", "<u8", "<u8"],
        "offsets": [0, 8, 20, 32, 40, 48, 56, 64],
        "itemsize": 72,
    }
)


@dataclass(frozen=True)
class KernelNode:
    """Kernel launch; `payload` is the packed parameter buffer."""

    function: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    payload: bytes
    attributes: Attributes = ()


@dataclass(frozen=True)
class Edge:
    """Edge of a graph: `source` and `target` are node handles, the other members are those of CUgraphEdgeData."""

    source: int
    target: int
    from_port: int = 0
    to_port: int = 0
    type: int = 0


@dataclass(frozen=True)
class Range:
    """Driver allocation, as the driver reports it."""

    base: int
    size: int
    host: bool = False


@dataclass(frozen=True)
class AllocationEvent:
    """Event of the allocation trace: `kind` is alloc or free, `pool` is whether the memory is in the pool of the graphs."""

    kind: str
    address: int
    size: int
    pool: bool = False


class DriverApi(Protocol):
    """Driver calls that this package uses."""

    def adopt_thread(self) -> None:
        """Prepare the calling thread for driver calls; each thread calls this first."""

    def nodes(self, graph: int) -> list[int]: ...
    def edges(self, graph: int) -> list[Edge]: ...
    def kind(self, node: int) -> int: ...
    def kernel_node(self, node: int) -> KernelNode: ...
    def memset_node(self, node: int) -> bytes:
        """Return the node as a row of tables.MEMSET."""

    def memcpy_node(self, node: int) -> bytes:
        """Return the node as a row of tables.MEMCPY.

        Raises:
            GraphRefusedError: The copy reads or writes host memory or an array.
        """

    def kernel(self, function: int) -> Kernel: ...
    def binary(self, digest: str) -> bytes: ...

    def load_library(self, image: bytes) -> int: ...
    def library_kernel(self, library: int, name: str) -> int: ...
    def set_function_attributes(self, function: int, attributes: Sequence[tuple[int, int]]) -> None: ...

    def new_graph(self) -> int: ...
    def add_kernels(self, graph: int, rows: Array) -> list[Handle]:
        """Add one node for each row of LAUNCH; the memory that the rows point to must stay valid during the call."""

    def add_memset(self, graph: int, row: Array) -> Handle: ...
    def add_memcpy(self, graph: int, row: Array) -> Handle: ...
    def add_empty(self, graph: int) -> Handle: ...
    def set_attributes(self, node: Handle, attributes: Attributes) -> None: ...
    def add_edges(self, graph: int, nodes: Sequence[Handle], edges: Array) -> None:
        """Add edges: rows of tables.EDGE whose ends are indices into `nodes`."""

    def instantiate(self, graph: int) -> int: ...
    def launch(self, executable: int, stream: int) -> None: ...
    def destroy(self, graph: int, executable: int) -> None: ...

    def address_range(self, address: int) -> Range | None: ...
    def read(self, address: int, size: int) -> bytes: ...
    def write(self, address: int, data: bytes) -> None: ...
    def fill(self, address: int, size: int, value: int) -> None: ...
    def synchronize(self) -> None: ...
    def move_tensor_map(self, descriptor: bytes, address: int) -> bytes: ...


@dataclass
class Captured:
    """Result of an ordinary capture: the raw graph and its executable; `keep` holds the objects that own them."""

    graph: int
    executable: int
    keep: list[Any] = field(default_factory=list)


class FrameworkApi(Protocol):
    """Calls to the framework that owns the tensors."""

    def sizes(self) -> dict[str, int]:
        """Return the batch size by graph key."""

    def regions(self) -> list[SymbolRegion]:
        """Return live named memory (param:, buffer:, kv:, static:)."""

    def pool(self) -> list[SymbolRegion]:
        """Return the segments of the graph-private pool after capture."""

    def reserve(self, sizes: Sequence[int]) -> list[int]:
        """Allocate memory for restored graphs, and return the addresses."""

    def release(self) -> None:
        """Free the memory of `reserve` when the bundle is not used after all."""

    def trace(self) -> list[AllocationEvent]:
        """Return all allocations of this process until now, in order."""

    def capture(self, key: str) -> Captured: ...
    def refusal(self, key: str) -> str | None: ...
    def stream(self) -> int: ...


class Workload(Protocol):
    """Inputs and outputs of a graph, for the proof."""

    has_eager: bool
    """True if `eager` can compute the outputs of a graph without the graph."""

    def prepare(self, key: str, seed: int) -> None:
        """Write seeded inputs and a seeded KV cache."""

    def observe(self, key: str) -> bytes:
        """Return the outputs and the KV cache after a replay."""

    def eager(self, key: str) -> None: ...
