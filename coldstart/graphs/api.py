"""Values exchanged with the CUDA driver and the framework; handles and addresses are integers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from coldstart.graphs.tables import Attributes


class NodeKind(IntEnum):
    """Values of CUgraphNodeType for the node types that can be restored."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2
    EMPTY = 5


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
    """Kernel launch node. `payload` is the packed parameter buffer, and `shared` the dynamic shared memory in bytes."""

    function: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    payload: bytes
    attributes: Attributes = ()


Edge = tuple[int, int, int, int, int]
"""Handles of the source and target nodes, followed by `from_port`, `to_port` and `type` of CUgraphEdgeData."""


@dataclass(frozen=True)
class AllocationEvent:
    """Event in the allocation trace. `kind` is "alloc" or "free", and `pool` is True if the memory is in the graphs' pool."""

    kind: str
    address: int
    size: int
    pool: bool = False


@dataclass
class Captured:
    """Captured graph and its executable. `keep` contains the objects that own them."""

    graph: int
    executable: int
    keep: list[Any] = field(default_factory=list)
