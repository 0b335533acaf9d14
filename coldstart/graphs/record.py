"""Read the captured CUDA graphs of a process into a `Snapshot`, and refuse graphs that cannot be relocated.

A snapshot contains the raw payloads of the graphs, the memory regions that they may point to, and the contents of the
memory that outlives the capture. Memory that was freed before the end of the capture is written before it is read
(MEDUSA, section 4.3), so its contents are not stored.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from coldstart.graphs import tables as stored
from coldstart.graphs.api import AllocationEvent, Captured, Edge, KernelNode, NodeKind
from coldstart.graphs.errors import AlteredTableError, DriverError, GraphRefusedError
from coldstart.graphs.tables import (
    DEVICE,
    HOST,
    NONE,
    TENSOR_MAP_BYTES,
    Array,
    Attributes,
    Graph,
    Intervals,
    Kernel,
    SymbolRegion,
    Tables,
)

if TYPE_CHECKING:
    from coldstart.graphs.cuda.driver import CudaDriver
    from coldstart.graphs.torch_framework import TorchFramework

COLLECTIVES = ("ncclDevKernel", "ncclKernel", "nvshmem", "cross_device_reduce", "multimem_all_reduce")
CONTENT_LIMIT = 1 << 26  # larger memory contains activations
ALIGN = 16
AWAY = 1 << 40  # address that is used to probe tensor maps

# An allocation is identified by its size and its number among the allocations of that size, inside or outside of the pool.
# An additional allocation of another size, or an additional segment, does not change these identities.
ALLOCATION = np.dtype([("address", "<u8"), ("size", "<u8"), ("number", "<u4"), ("pool", "?"), ("live", "?")])
# Row of a decoded tensor map; `coded` marks the bytes that encode its address.
MAP = np.dtype([("place", "<u4"), ("address", "<u8"), ("coded", "?", TENSOR_MAP_BYTES)])


@dataclass
class Snapshot:
    """Graphs and memory of one process.

    `regions` have names, `pool` are segments of the graphs' pool, and `ranges` are other driver allocations that a
    parameter word points into. `maps` are indexed by graph key, and `contents` by address.
    """

    tables: Tables
    regions: list[SymbolRegion]
    pool: list[SymbolRegion]
    ranges: list[SymbolRegion]
    allocations: Array
    maps: dict[str, Array]
    contents: dict[int, bytes]
    binaries: dict[str, bytes]

    def unnamed(self) -> list[SymbolRegion]:
        """Return the live allocations outside the pool that have no name."""
        rows = self.allocations[self.allocations["live"] & ~self.allocations["pool"]]
        named = Intervals([*self.regions, *self.pool])
        ends = rows["address"] + np.maximum(rows["size"], 1) - 1
        free = (named.find(rows["address"]) == NONE) & (named.find(ends) == NONE)
        return [SymbolRegion(f"alloc:{s}.{n}", s, a) for a, s, n, _, _ in rows[free].tolist() if s]

    def libraries(self) -> list[SymbolRegion]:
        """Return the driver allocations that contain no memory of the framework."""
        device = [r for r in self.ranges if r.symbol == DEVICE]
        bases = np.array([r.base for r in [*self.regions, *self.pool]], np.uint64)
        holders = set(Intervals(device).find(np.append(bases, self.allocations["address"])).tolist())
        return [region for number, region in enumerate(device) if number not in holders]

    def save(self, directory: Path) -> None:
        """Write the snapshot, without the kernel binaries, into `directory`."""
        stored.save(self.tables, directory, {})
        maps: dict[str, Any] = {f"map {key}": rows for key, rows in self.maps.items()}
        held = {f"content {base}": np.frombuffer(data, "u1") for base, data in self.contents.items()}
        np.savez(directory / "memory.npz", allocations=self.allocations, **maps, **held)  # type: ignore[arg-type]
        (directory / "memory.json").write_bytes(msgspec.json.encode((self.regions, self.pool, self.ranges)))


def load_snapshot(directory: Path) -> Snapshot:
    """Read the snapshot in a directory. Raises AlteredTableError if it cannot be read."""
    kinds = tuple[list[SymbolRegion], list[SymbolRegion], list[SymbolRegion]]
    try:
        regions, pool, ranges = msgspec.json.decode((directory / "memory.json").read_bytes(), type=kinds)
        with np.load(directory / "memory.npz", allow_pickle=False) as held:
            arrays = dict(held)
    except (OSError, ValueError, EOFError) as error:
        raise AlteredTableError(f"cannot read the snapshot in {directory}: {error}") from error
    return Snapshot(
        stored.load(directory), regions, pool, ranges, arrays.pop("allocations"),
        maps={name[4:]: rows for name, rows in arrays.items() if name.startswith("map ")},
        contents={int(name[8:]): rows.tobytes() for name, rows in arrays.items() if name.startswith("content ")},
        binaries={},
    )  # fmt: skip


def create_snapshot(
    driver: CudaDriver, framework: TorchFramework, captured: Mapping[str, Captured]
) -> Snapshot:
    """Create a snapshot of the captured graphs, with all data that another process needs to combine them."""
    pool = framework.pool()
    inside = Intervals(pool).find(np.array([r.base for r in framework.regions()], np.uint64))
    named = drop_aliases(r for r, at in zip(framework.regions(), inside.tolist(), strict=True) if at == NONE)
    tables = read_graphs(driver, framework, captured)
    snapshot = Snapshot(
        tables, named, pool, [], number_allocations(framework.trace()),
        maps={key: _decode_maps(driver, graph, tables.kernels) for key, graph in tables.graphs.items()},
        contents={}, binaries={k.binary: driver.binary(k.binary) for k in tables.kernels if k.binary},
    )  # fmt: skip
    addresses = {key: _candidates(graph, tables.kernels) for key, graph in tables.graphs.items()}
    used = np.unique(np.concatenate([np.zeros(0, np.uint64), *addresses.values()]))
    snapshot.ranges = _find_allocations(driver, used[Intervals([*named, *pool]).find(used) == NONE])
    host = Intervals([r for r in snapshot.ranges if r.symbol == HOST])
    pinned = [key for key, found in addresses.items() if (host.find(found) != NONE).any()]
    snapshot.tables = tables.drop_graphs(dict.fromkeys(pinned, "a kernel parameter is a pinned host pointer"))
    snapshot.contents = _read_contents(driver, snapshot, used)
    return snapshot


def number_allocations(events: Iterable[AllocationEvent]) -> Array:
    """Return one ALLOCATION row for each allocation in the trace, in order."""
    counts, live = Counter[tuple[int, bool]](), dict[int, int]()
    rows = list[tuple[int, int, int, bool, bool]]()
    for event in events:
        if event.kind != "alloc":
            live.pop(event.address, None)
            continue
        same = event.size, event.pool
        live[event.address] = len(rows)
        rows.append((event.address, event.size, counts[same], event.pool, False))
        counts[same] += 1
    found = np.array(rows, ALLOCATION)
    found["live"][list(live.values())] = True
    return found


def drop_aliases(regions: Iterable[SymbolRegion]) -> list[SymbolRegion]:
    """Return the non-empty regions by address, except regions that overlap an earlier region (views of one storage)."""
    kept: list[SymbolRegion] = []
    end = 0
    for region in sorted((r for r in regions if r.size), key=lambda r: (r.base, -r.size, r.symbol)):
        if region.base >= end:
            kept.append(region)
            end = region.base + region.size
    return kept


# --- graphs ------------------------------------------------------------------------------------------


class GraphBuilder:
    """Builder of the tables of several graphs that share kernels and attributes."""

    def __init__(self) -> None:
        self._kernels = dict[Kernel, int]()
        self._attributes: dict[Attributes, int] = {(): 0}
        self._nodes, self._payload = list[tuple[object, ...]](), bytearray()
        self.graphs: dict[str, Graph] = {}

    def add_kernel(self, node: KernelNode, kernel: Kernel) -> None:
        """Append a kernel launch node to the current graph."""
        number = self._kernels.setdefault(kernel, len(self._kernels))
        attributes = self._attributes.setdefault(node.attributes, len(self._attributes))
        row = (NodeKind.KERNEL, 0, attributes, number, node.grid, node.block, len(node.payload), node.shared)
        self._append(row, node.payload)

    def add_other(self, kind: NodeKind, payload: bytes = b"") -> None:
        """Append a memset, memory copy or empty node to the current graph."""
        row = (kind, 0, 0, stored.NO_KERNEL, (0, 0, 0), (0, 0, 0), len(payload), 0)
        self._append(row, payload)

    def _append(self, row: tuple[object, ...], payload: bytes) -> None:
        self._nodes.append((*row, len(self._payload)))
        self._payload += payload.ljust(-(-len(payload) // ALIGN) * ALIGN, b"\0")

    def finish(self, key: str, size: int, handles: Sequence[int], edges: Iterable[Edge]) -> None:
        """Store the current graph under `key`. `handles` are its nodes in the order in which they were appended."""
        number = {handle: i for i, handle in enumerate(handles)}
        rows = [(number[source], number[target], *data, 0) for source, target, *data in edges]
        payload = np.frombuffer(bytes(self._payload), np.uint8)
        self.graphs[key] = Graph(
            size, np.array(self._nodes, stored.NODE), np.array(sorted(rows), stored.EDGE), payload
        )

    def begin(self) -> None:
        """Start the next graph, and discard an unfinished graph."""
        self._nodes, self._payload = [], bytearray()

    def build_tables(self, refused: dict[str, str]) -> Tables:
        """Return the tables of all finished graphs, without regions or relocations."""
        return Tables(self.graphs, list(self._kernels), list(self._attributes), refused=refused)


def read_graphs(driver: CudaDriver, framework: TorchFramework, captured: Mapping[str, Captured]) -> Tables:
    """Return the tables of all supported graphs, with the reason for each refused graph."""
    builder, sizes, refused = GraphBuilder(), framework.sizes, dict[str, str]()
    for key, capture in captured.items():
        builder.begin()
        try:
            handles = driver.nodes(capture.graph)
            for handle in handles:
                _read_node(driver, builder, handle)
            builder.finish(key, sizes[key], handles, driver.edges(capture.graph))
        except (GraphRefusedError, DriverError) as failure:
            refused[key] = str(failure)
    return builder.build_tables(refused)


def _read_node(driver: CudaDriver, builder: GraphBuilder, handle: int) -> None:
    kind = driver.kind(handle)
    if kind == NodeKind.KERNEL:
        node = driver.kernel_node(handle)
        kernel = driver.kernel(node.function)
        if any(mark in kernel.name for mark in COLLECTIVES):
            raise GraphRefusedError(f"cannot restore the collective kernel {kernel.name}")
        if kernel.mutable_globals:  # the restored copy of the binary would have its own variables
            raise GraphRefusedError(f"cannot restore kernel {kernel.name}: its binary has mutable globals")
        builder.add_kernel(node, kernel)
    elif kind in (NodeKind.MEMSET, NodeKind.MEMCPY, NodeKind.EMPTY):
        readers = {NodeKind.MEMSET: driver.memset_node, NodeKind.MEMCPY: driver.memcpy_node}
        builder.add_other(NodeKind(kind), readers[NodeKind(kind)](handle) if kind != NodeKind.EMPTY else b"")
    else:
        raise GraphRefusedError(f"cannot restore a graph node of type {kind.name}")


# --- memory ------------------------------------------------------------------------------------------


def _candidates(graph: Graph, kernels: Sequence[Kernel]) -> Array:
    """Return the words in a graph that could be addresses."""
    values = stored.values(graph.payload, stored.find_word_offsets(graph, kernels))
    return values[(values >= stored.LOWEST) & (values < stored.HIGHEST)]


def _find_allocations(driver: CudaDriver, addresses: Array) -> list[SymbolRegion]:
    """Return the driver allocations that contain these sorted addresses."""
    ranges: dict[int, SymbolRegion] = {}
    end = 0
    for address in addresses.tolist():
        held = driver.address_range(address) if address > end else None
        if held is not None:
            ranges[held.base] = held
            end = held.base + held.size - 1
    return list(ranges.values())


def _read_contents(driver: CudaDriver, snapshot: Snapshot, used: Array) -> dict[int, bytes]:
    """Return, by address, the contents of live pool memory and of unnamed memory that a parameter word points into."""
    rows = snapshot.allocations[snapshot.allocations["live"] & snapshot.allocations["pool"]]
    spans = [(a, s) for a, s, _, _, _ in rows.tolist()]
    others = [*snapshot.unnamed(), *snapshot.libraries()]
    pointed = np.unique(Intervals(others).find(np.concatenate([used, used - np.uint64(1)])))
    spans += [(others[i].base, others[i].size) for i in pointed.tolist() if i != NONE]
    return {base: driver.read(base, size) for base, size in spans if 0 < size <= CONTENT_LIMIT}


# --- tensor maps -------------------------------------------------------------------------------------


def _decode_maps(driver: CudaDriver, graph: Graph, kernels: Sequence[Kernel]) -> Array:
    """Return a MAP row for each tensor map in a graph, decoded by the bits that the driver writes for an address."""
    rows: list[tuple[int, int, Array]] = []
    masks: list[int] = []
    for place in stored.find_tensor_map_offsets(graph, kernels).tolist():
        descriptor = graph.payload[place : place + TENSOR_MAP_BYTES].tobytes()
        try:
            masks = masks or compute_bit_masks(driver, descriptor)
            address = decode_map(driver, descriptor, masks)
        except DriverError:  # these 128 bytes are not a tensor map
            continue
        if address is not None:
            union = functools.reduce(operator.or_, masks, 0).to_bytes(TENSOR_MAP_BYTES, "little")
            rows.append((place, address, np.frombuffer(union, np.uint8) != 0))
    return np.array(rows, MAP)


def compute_bit_masks(driver: CudaDriver, descriptor: bytes) -> list[int]:
    """Return, for each address bit 0 to 47, a mask of the descriptor bits that it changes (0 for the aligned bits 0 to 3).

    No probed address is 0, because a driver may reject 0.
    """
    masks = [0, 0, 0, 0]
    for bit in range(4, 48):
        other = AWAY if 1 << bit != AWAY else AWAY >> 1
        masks.append(_move(driver, descriptor, other | 1 << bit) ^ _move(driver, descriptor, other))
    return masks


def _move(driver: CudaDriver, descriptor: bytes, address: int) -> int:
    return int.from_bytes(driver.move_tensor_map(descriptor, address), "little")


def decode_map(driver: CudaDriver, descriptor: bytes, masks: Sequence[int]) -> int | None:
    """Return the device address in a tensor map, or None if writing this address does not reproduce the descriptor."""
    changed = int.from_bytes(descriptor, "little") ^ _move(driver, descriptor, AWAY)
    address = AWAY ^ sum(1 << bit for bit, mask in enumerate(masks) if mask and changed & mask == mask)
    return address if address and driver.move_tensor_map(descriptor, address) == descriptor else None
