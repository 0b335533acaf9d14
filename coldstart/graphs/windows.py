"""Windows where an address can be: 8 bytes at 4-byte stride within one parameter."""

from __future__ import annotations

import numpy as np

from coldstart.graphs.tables import TENSOR_MAP_BYTES, Array, Tables

STRIDE, MAP_STRIDE = 4, 64
LOWEST, HIGHEST = 1 << 32, 1 << 48


def places(tables: Tables, stride: int = STRIDE) -> Array:
    """Return the sorted payload positions (int64) of all candidate windows."""
    parts = [_kernel_places(tables, number, stride) for number in range(len(tables.kernels))]
    for kind, offsets in ((1, (0, 8)), (2, (0,))):
        starts = tables.nodes["payload"][tables.nodes["kind"] == kind].astype(np.int64)
        parts.append((starts[:, None] + np.array(offsets)).ravel())
    return np.sort(np.concatenate([np.zeros(0, np.int64), *parts]))


def _kernel_places(tables: Tables, number: int, stride: int) -> Array:
    spans = tables.kernels[number].layout
    offsets = [np.arange(at, at + size - 7, stride) for at, size in spans if size >= 8]
    if not offsets:
        return np.zeros(0, np.int64)
    mine = (tables.nodes["kind"] == 0) & (tables.nodes["kernel"] == number)
    starts = tables.nodes["payload"][mine].astype(np.int64)
    positions: Array = starts[:, None] + np.concatenate(offsets)
    return positions.ravel()


def values(payload: Array, at: Array) -> Array:
    """Return the 8-byte little-endian words at those positions, of any alignment."""
    gathered = np.ascontiguousarray(payload[at[:, None] + np.arange(8)])
    return gathered.view("<u8").reshape(-1)


def owners(tables: Tables, at: Array) -> Array:
    """Return the node number of each position."""
    return np.searchsorted(tables.nodes["payload"], at, side="right") - 1


def graphs(tables: Tables, at: Array) -> Array:
    """Return the graph number of each position."""
    return np.searchsorted(tables.graphs["node"], owners(tables, at), side="right") - 1


def maps(tables: Tables) -> Array:
    """Return the positions where a tensor map can be: aligned within its parameter, alone or in a struct.

    The alignment is relative to the start of the parameter. The compiler aligns the parameter in the constant
    bank but not in the packed buffer.
    """
    parts = [np.zeros(0, np.int64)]
    for number, kernel in enumerate(tables.kernels):
        mine = (tables.nodes["kind"] == 0) & (tables.nodes["kernel"] == number)
        starts = tables.nodes["payload"][mine].astype(np.int64)
        for offset, size in kernel.layout:
            inside = np.arange(offset, offset + size - TENSOR_MAP_BYTES + 1, MAP_STRIDE)
            parts.append((starts[:, None] + inside).ravel())
    return np.sort(np.concatenate(parts))
