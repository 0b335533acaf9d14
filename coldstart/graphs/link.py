"""Dynamic linking of a bundle: word = base[region] + offset for all relocations at once, in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from coldstart.graphs.api import LAUNCH, DriverApi, FrameworkApi
from coldstart.graphs.errors import MissingRegionError
from coldstart.graphs.tables import ABSOLUTE, TENSOR_MAP_BYTES, Array, SymbolRegion, Tables
from coldstart.graphs.trace import live_allocation


@dataclass
class Bases:
    """Addresses of a bundle's symbols in this process, and the memory allocated for them.

    `owned` are the symbols whose memory this object allocated; the bundle provides their contents. With
    `adopt`, an unnamed allocation that this process lacks is owned too instead of raising an error. This is
    right for workspaces and constants, and wrong for state that code outside the graphs changes, so the proof
    must use `adopt` too.
    """

    driver: DriverApi
    framework: FrameworkApi
    adopt: bool = False
    owned: set[str] = field(default_factory=set)
    allocated: list[int] = field(default_factory=list)

    def find(self, tables: Tables) -> Array:
        """Return the address of every symbol (u64). Raises MissingRegionError."""
        named = {r.symbol: r for r in self.framework.regions()}
        pools = [r for r in tables.regions if r.symbol.startswith("pool:")]
        reserved = self.framework.reserve_pool([r.size for r in pools]) if pools else []
        placed = dict(zip((r.symbol for r in pools), reserved, strict=True))
        self.owned |= set(placed)
        return np.array([placed.get(r.symbol) or self._base(r, named) for r in tables.regions], np.uint64)

    def _base(self, region: SymbolRegion, named: dict[str, SymbolRegion]) -> int:
        if region.symbol.startswith("lib:"):
            return self._own(region)
        if region.symbol.startswith("alloc#"):
            allocation = live_allocation(self.framework.trace(), int(region.symbol[6:]))
            return self._own(region) if allocation is None and self.adopt else _sized(region, allocation)
        here = named.get(region.symbol)
        return _sized(region, (here.base, here.size) if here else None)

    def _own(self, region: SymbolRegion) -> int:
        self.owned.add(region.symbol)
        self.allocated.append(self.driver.allocate(region.size))
        return self.allocated[-1]

    def release(self) -> None:
        """Free all memory of the restored graphs, so that vLLM can capture its own. Raises DriverError."""
        self.framework.release_pool()
        while self.allocated:
            self.driver.free(self.allocated.pop())


def _sized(region: SymbolRegion, allocation: tuple[int, int] | None) -> int:
    if allocation is None:
        raise MissingRegionError(f"{region.symbol} does not exist in this process")
    if allocation[1] != region.size:
        raise MissingRegionError(
            f"{region.symbol} has {allocation[1]} bytes here and {region.size} in the bundle"
        )
    return allocation[0]


def relocate(payload: Array, relocations: Array, base: Array, driver: DriverApi | None = None) -> Array:
    """Return a copy of the payload with all relocations applied."""
    out = np.array(payload)
    plain = relocations[relocations["kind"] == ABSOLUTE] if relocations["kind"].any() else relocations
    place, words = plain["place"], base[plain["region"]] + plain["offset"].astype(np.uint64)
    if (place & 7).any():
        out[place.astype(np.int64)[:, None] + np.arange(8)] = words.view(np.uint8).reshape(-1, 8)
    else:
        whole = len(out) // 8 * 8
        out[:whole].view("<u8")[place >> 3] = words
    if len(plain) != len(relocations) and driver is not None:
        _move_maps(out, relocations[relocations["kind"] != ABSOLUTE], base, driver)
    return out


def _move_maps(out: Array, maps: Array, base: Array, driver: DriverApi) -> None:
    for place, region, _, _, offset in maps.tolist():
        descriptor = out[place : place + TENSOR_MAP_BYTES].tobytes()
        moved = driver.move_tensor_map(descriptor, int(base[region]) + offset)
        out[place : place + TENSOR_MAP_BYTES] = np.frombuffer(moved, np.uint8)


def find_broken_assumptions(tables: Tables, base: Array) -> dict[int, tuple[int, str]]:
    """Return (graph, reason) by row of `assumed`, for words of two readings that differ in this process."""
    a = tables.assumed
    sizes = np.array([r.size for r in tables.regions] or [0], np.uint64)
    ends = base[a["end_of"]] + sizes[a["end_of"]] if len(a) else np.zeros(0, np.uint64)
    rows = np.flatnonzero(ends != base[a["start_of"]]) if len(a) else np.zeros(0, np.int64)
    names = [r.symbol for r in tables.regions]
    return {
        row: (
            graph,
            f"a word may be the end of {names[e]} or the start of {names[s]}, which do not touch here",
        )
        for row, (graph, e, s) in zip(rows.tolist(), a[rows].tolist(), strict=True)
    }


@dataclass
class Rows:
    """Launch parameters: `rows[i]` launches node i (zeros for other kinds).

    `pointers` and `payload` must stay alive while the rows are used.
    """

    rows: Array
    pointers: Array
    payload: Array


def launch_rows(tables: Tables, payload: Array, functions: Sequence[int]) -> Rows:
    """Return CUDA_KERNEL_NODE_PARAMS for every node, with kernelParams arrays that point into `payload`."""
    nodes = tables.nodes
    kernel = np.flatnonzero(nodes["kind"] == 0)
    number = nodes["kernel"][kernel]
    counts = np.array([len(k.layout) for k in tables.kernels] or [0])
    start = np.concatenate([[0], np.cumsum(counts[number])]) if len(kernel) else np.zeros(1, np.int64)
    pointers = _pointers(tables, payload, kernel, number, start)
    rows = np.zeros(len(nodes), LAUNCH)
    rows["function"][kernel] = np.array([*functions, 0], np.uint64)[number]
    for name in ("grid", "block", "shared"):
        rows[name][kernel] = nodes[name][kernel]
    rows["params"][kernel] = pointers.ctypes.data + 8 * start[:-1].astype(np.uint64)
    return Rows(rows, pointers, payload)


def _pointers(tables: Tables, payload: Array, kernel: Array, number: Array, start: Array) -> Array:
    out = np.zeros(int(start[-1]) + 1, np.uint64)
    address = payload.ctypes.data + tables.nodes["payload"][kernel].astype(np.uint64)
    for k in np.unique(number).tolist():
        offsets = np.array([offset for offset, _ in tables.kernels[k].layout], np.uint64)
        mine = np.flatnonzero(number == k)
        out[start[mine][:, None] + np.arange(len(offsets))] = address[mine][:, None] + offsets
    return out
