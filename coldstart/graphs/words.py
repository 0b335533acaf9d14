"""Words of a graph's parameters that can be addresses, and the memory of one process at an address."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coldstart.graphs.errors import GraphError
from coldstart.graphs.tables import TENSOR_MAP_BYTES, Array, Graph, Kernel, SymbolRegion

NONE = -1
STRIDE, MAP_STRIDE = 4, 64
LOWEST, HIGHEST = 1 << 32, 1 << 48


def places(graph: Graph, kernels: Sequence[Kernel], stride: int = STRIDE) -> Array:
    """Return the sorted positions in the payload (int64) where 8 bytes within one parameter can be an address."""
    parts = [
        _within(graph, number, [np.arange(at, at + size - 7, stride) for at, size in kernels[number].layout])
        for number in _kernels(graph)
    ]
    for kind, offsets in ((1, (0, 8)), (2, (0,))):
        starts = graph.nodes["payload"][graph.nodes["kind"] == kind].astype(np.int64)
        parts.append((starts[:, None] + np.array(offsets)).ravel())
    return np.sort(np.concatenate([np.zeros(0, np.int64), *parts]))


def maps(graph: Graph, kernels: Sequence[Kernel]) -> Array:
    """Return the positions where a tensor map can be: aligned within its parameter, alone or in a struct.

    The alignment is relative to the start of the parameter. The compiler aligns the parameter in the constant
    bank but not in the packed buffer.
    """
    parts = [
        _within(graph, number, [np.arange(a, a + n - TENSOR_MAP_BYTES + 1, MAP_STRIDE) for a, n in kernels[number].layout])
        for number in _kernels(graph)
    ]  # fmt: skip
    return np.sort(np.concatenate([np.zeros(0, np.int64), *parts]))


def _kernels(graph: Graph) -> list[int]:
    numbers: list[int] = np.unique(graph.nodes["kernel"][graph.nodes["kind"] == 0]).tolist()
    return numbers


def _within(graph: Graph, number: int, offsets: Sequence[Array]) -> Array:
    """Return these offsets in the payload of every launch of a kernel."""
    mine = (graph.nodes["kind"] == 0) & (graph.nodes["kernel"] == number)
    positions: Array = graph.nodes["payload"][mine].astype(np.int64)[:, None] + np.concatenate(
        [np.zeros(0, np.int64), *offsets]
    )
    return positions.ravel()


def values(payload: Array, at: Array) -> Array:
    """Return the 8-byte little-endian words at those positions, of any alignment."""
    gathered = np.ascontiguousarray(payload[at[:, None] + np.arange(8)])
    return gathered.view("<u8").reshape(-1)


class Intervals:
    """Disjoint regions of one process, by address."""

    def __init__(self, regions: Sequence[SymbolRegion]) -> None:
        self.order = np.argsort([r.base for r in regions], kind="stable").astype(np.int64)
        self.base = np.array([regions[i].base for i in self.order], np.uint64)
        self.size = np.array([regions[i].size for i in self.order], np.uint64)
        overlap = self.base[:-1] + self.size[:-1] > self.base[1:]
        if overlap.any():
            first = regions[self.order[int(np.argmax(overlap))]]
            raise GraphError(f"region {first.symbol} overlaps the next region; symbols must not alias")

    def find(self, addresses: Array) -> Array:
        """Return the number of the region with base <= address < base + size for each address, or NONE."""
        if not len(self.base):
            return np.full(len(addresses), NONE)
        at = np.searchsorted(self.base, addresses, side="right") - 1
        safe = np.maximum(at, 0)
        hit = (at >= 0) & (addresses - self.base[safe] < self.size[safe])
        return np.where(hit, self.order[safe], NONE)
