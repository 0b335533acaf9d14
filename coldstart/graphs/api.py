"""Values that the CUDA driver and the framework exchange with this package; handles and addresses are integers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from coldstart.graphs.tables import Attributes


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
class AllocationEvent:
    """Event of the allocation trace: `kind` is alloc or free, `pool` is whether the memory is in the pool of the graphs."""

    kind: str
    address: int
    size: int
    pool: bool = False


@dataclass
class Captured:
    """Result of an ordinary capture: the raw graph and its executable; `keep` holds the objects that own them."""

    graph: int
    executable: int
    keep: list[Any] = field(default_factory=list)
