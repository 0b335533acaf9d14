"""The two protocols behind which a GPU, a simulator and a fake driver are alike.

Handles and addresses are integers.  Nothing here names torch or CUDA types; every driver call that fails
raises DriverError, and a caller that sees one captures normally.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import numpy as np

from coldstart.graphs.tables import Array, Attributes, Kernel, SymbolRegion


class NodeKind(IntEnum):
    """CUgraphNodeType."""

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


Handle = Any  # a node while a graph is being built: whatever the backend likes best

# CUDA_KERNEL_NODE_PARAMS_v2, byte for byte: one row is what the driver is handed.
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
    """One launch; `payload` is the packed parameter buffer."""

    function: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    payload: bytes
    attributes: Attributes = ()


@dataclass(frozen=True)
class Edge:
    """source and target are node handles; the rest is CUgraphEdgeData."""

    source: int
    target: int
    from_port: int = 0
    to_port: int = 0
    type: int = 0


@dataclass(frozen=True)
class Range:
    """A driver allocation as the driver itself reports it."""

    base: int
    size: int
    host: bool = False


@dataclass(frozen=True)
class AllocationEvent:
    """One line of the allocation trace: kind is alloc or free."""

    kind: str
    address: int = 0
    size: int = 0


class DriverApi(Protocol):
    """What the package asks of a driver."""

    def adopt_thread(self) -> None:
        """Called first in every thread that is to make driver calls."""

    def nodes(self, graph: int) -> list[int]: ...
    def edges(self, graph: int) -> list[Edge]: ...
    def kind(self, node: int) -> int: ...
    def kernel_node(self, node: int) -> KernelNode: ...
    def memset_node(self, node: int) -> bytes:
        """A row of table.MEMSET."""

    def memcpy_node(self, node: int) -> bytes:
        """A row of table.MEMCPY. Raises Refused for copies that touch host memory or arrays."""

    def kernel(self, function: int) -> Kernel: ...
    def binary(self, digest: str) -> bytes: ...

    def load_library(self, image: bytes) -> int: ...
    def library_kernel(self, library: int, name: str) -> int: ...
    def loaded_functions(self) -> list[int]:
        """Functions of every module that is loaded now (section 5: module enumeration)."""

    def exported(self, name: str, library: str | None) -> int | None:
        """dlsym and cudaGetFuncBySymbol; None where the symbol is hidden."""

    def set_function_attributes(self, function: int, attributes: Sequence[tuple[int, int]]) -> None: ...

    def new_graph(self) -> int: ...
    def add_kernels(self, graph: int, rows: Array) -> list[Handle]:
        """Add one node per row of LAUNCH; the rows' pointers must stay alive during the call."""

    def add_memset(self, graph: int, row: Array) -> Handle: ...
    def add_memcpy(self, graph: int, row: Array) -> Handle: ...
    def add_empty(self, graph: int) -> Handle: ...
    def set_attributes(self, node: Handle, attributes: Attributes) -> None: ...
    def add_edges(self, graph: int, nodes: Sequence[Handle], edges: Array) -> None:
        """`edges` are rows of table.EDGE whose ends number `nodes`."""

    def instantiate(self, graph: int) -> int: ...
    def launch(self, executable: int, stream: int) -> None: ...
    def destroy(self, graph: int, executable: int) -> None: ...

    def allocate(self, size: int) -> int: ...
    def free(self, address: int) -> None: ...
    def address_range(self, address: int) -> Range | None: ...
    def read(self, address: int, size: int) -> bytes: ...
    def write(self, address: int, data: bytes) -> None: ...
    def fill(self, address: int, size: int, value: int) -> None: ...
    def synchronize(self) -> None: ...
    def move_tensor_map(self, descriptor: bytes, address: int) -> bytes: ...


@dataclass
class Captured:
    """An ordinary capture: the raw graph, and something whose replay() launches it."""

    graph: int
    executable: int
    keep: list[Any] = field(default_factory=list)


class FrameworkApi(Protocol):
    """What the package asks of the framework that owns the tensors."""

    def sizes(self) -> dict[str, int]:
        """Graph key to batch size."""

    def regions(self) -> list[SymbolRegion]:
        """Live named memory (param:, buffer:, kv:, static:), not overlapping."""

    def pool(self) -> list[SymbolRegion]:
        """Segments of the graph-private pool after capture, in order of allocation."""

    def reserve_pool(self, sizes: Sequence[int]) -> list[int]: ...
    def release_pool(self) -> None:
        """Give back what reserve_pool gave: the bundle is not used after all."""

    def trace(self) -> list[AllocationEvent]: ...
    def capture(self, key: str) -> Captured: ...
    def refusal(self, key: str) -> str | None: ...
    def stream(self) -> int: ...
    def trigger(self) -> None:
        """Run the first layer so that its kernels' modules load (section 5.2)."""


class Workload(Protocol):
    """Inputs and outputs of a graph, for proof and for poisoning."""

    has_eager: bool
    """Whether `eager` can compute a graph's outputs here without the graph."""

    def prepare(self, key: str, seed: int) -> None:
        """Write seeded inputs and a seeded KV cache."""

    def observe(self, key: str, *, restored: bool = False) -> bytes:
        """Outputs and KV cache after a replay; a restored graph's outputs may lie elsewhere."""

    def eager(self, key: str) -> None: ...
