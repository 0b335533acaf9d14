"""Read captured CUDA graphs into a `Snapshot`, and refuse each graph that cannot be relocated, with the reason."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence

import numpy as np

from coldstart.graphs import trace as traces
from coldstart.graphs import windows
from coldstart.graphs.api import Captured, DriverApi, FrameworkApi, NodeKind, Range
from coldstart.graphs.builder import Builder
from coldstart.graphs.errors import DriverError, GraphRefusedError
from coldstart.graphs.intervals import NONE, Intervals
from coldstart.graphs.sides import library_ranges
from coldstart.graphs.snapshot import MAP, Snapshot
from coldstart.graphs.tables import TENSOR_MAP_BYTES, Array, Kernel, SymbolRegion, Tables

COLLECTIVES = ("ncclDevKernel", "ncclKernel", "nvshmem", "cross_device_reduce", "multimem_all_reduce")
# Graphs retain only constants and tables between launches; larger memory holds activations.
CONTENT_LIMIT = 1 << 26
AWAY = 1 << 40  # an address to move tensor maps to


def take(driver: DriverApi, framework: FrameworkApi, captured: dict[str, Captured]) -> Snapshot:
    """Return a snapshot of these captures with all the data that another process needs."""
    tables = read_graphs(driver, framework, captured)
    regions = all_regions(framework)
    trace = traces.pack(framework.trace())
    ranges = _ranges(driver, tables, regions)
    _refuse_host(tables, ranges)
    libraries = _libraries(tables, regions, ranges, trace)
    digests = {k.binary for k in tables.kernels if k.binary}
    return Snapshot(
        tables=tables, regions=regions, ranges=ranges, trace=trace,
        maps=_decode_maps(driver, tables),
        contents=_contents(driver, [*framework.pool(), *libraries, *_unnamed(tables, regions, trace)]),
        binaries={d: driver.binary(d) for d in digests},
    )  # fmt: skip


def all_regions(framework: FrameworkApi) -> list[SymbolRegion]:
    """Return named memory and pool segments, disjoint: a named region inside the pool is represented by the pool."""
    pool = framework.pool()
    inside = Intervals(pool).inside(np.array([r.base for r in framework.regions()], np.uint64)).region
    named = [r for r, covered in zip(framework.regions(), inside, strict=True) if covered == NONE]
    return [*drop_aliases(named), *pool]


def drop_aliases(regions: Sequence[SymbolRegion]) -> list[SymbolRegion]:
    """Drop empty regions, and regions that alias memory of an earlier one (views of one storage)."""
    kept: list[SymbolRegion] = []
    end = 0
    for region in sorted((r for r in regions if r.size), key=lambda r: (r.base, -r.size, r.symbol)):
        if region.base >= end:
            kept.append(region)
            end = region.base + region.size
    return kept


def read_graphs(driver: DriverApi, framework: FrameworkApi, captured: dict[str, Captured]) -> Tables:
    """Return tables with one row for each node of every supported graph."""
    builder, sizes = Builder(), framework.sizes()
    for key, capture in captured.items():
        builder.begin(key, sizes[key])
        try:
            reason = framework.refusal(key)
            if reason is not None:
                raise GraphRefusedError(reason)
            handles = driver.nodes(capture.graph)
            for handle in handles:
                _read_node(driver, builder, handle)
            builder.finish(handles, driver.edges(capture.graph))
        except (GraphRefusedError, DriverError) as failure:
            builder.abandon(str(failure))
    return builder.tables()


def _read_node(driver: DriverApi, builder: Builder, handle: int) -> None:
    kind = driver.kind(handle)
    if kind == NodeKind.KERNEL:
        node = driver.kernel_node(handle)
        kernel = driver.kernel(node.function)
        _refuse_collective(kernel)
        builder.kernel(node, kernel)
    elif kind == NodeKind.MEMSET:
        builder.other(NodeKind.MEMSET, driver.memset_node(handle))
    elif kind == NodeKind.MEMCPY:
        builder.other(NodeKind.MEMCPY, driver.memcpy_node(handle))
    elif kind == NodeKind.EMPTY:
        builder.other(NodeKind.EMPTY)
    else:
        raise GraphRefusedError(f"a {NodeKind(kind).name.lower()} node cannot be restored")


def _refuse_collective(kernel: Kernel) -> None:
    if any(mark in kernel.name for mark in COLLECTIVES):
        raise GraphRefusedError(f"collective kernel {kernel.name} cannot be restored")


def _candidates(tables: Tables) -> tuple[Array, Array]:
    at = windows.places(tables)
    values = windows.values(tables.payload, at)
    plausible = (values >= windows.LOWEST) & (values < windows.HIGHEST)
    return at[plausible], values[plausible]


def _ranges(driver: DriverApi, tables: Tables, regions: list[SymbolRegion]) -> list[Range]:
    """Return the driver allocations that a parameter word points into and that no region covers."""
    _, addresses = _candidates(tables)
    unknown = np.unique(addresses[Intervals(regions).inside(addresses).region == NONE])
    ranges: dict[int, Range] = {}
    end = 0
    for address in unknown.tolist():
        if address <= end:
            continue
        held = driver.address_range(address)
        if held is not None:
            ranges[held.base] = held
            end = held.base + held.size - 1
    return list(ranges.values())


def _refuse_host(tables: Tables, ranges: Iterable[Range]) -> None:
    """Refuse the graphs with a parameter word that points into pinned host memory."""
    host = Intervals([SymbolRegion("host", r.size, r.base) for r in ranges if r.host])
    at, addresses = _candidates(tables)
    graphs = windows.graphs(tables, at[host.inside(addresses).region != NONE])
    for index in np.unique(graphs).tolist():
        tables.refused[tables.keys[index]] = "pinned host pointer among the parameters"


def _libraries(
    tables: Tables, regions: list[SymbolRegion], ranges: list[Range], trace: Array
) -> list[SymbolRegion]:
    """Return the driver allocations of libraries that a parameter word points into."""
    mapped = [SymbolRegion("", r.size, r.base) for r in ranges if not r.host]
    mine = library_ranges(mapped, regions, trace)
    used = np.unique(Intervals(mine).inside(_candidates(tables)[1]).region)
    return [mine[i] for i in used.tolist() if i != NONE]


def _unnamed(tables: Tables, regions: list[SymbolRegion], trace: Array) -> list[SymbolRegion]:
    """Return the live traced allocations without a name that a word points into."""
    _, addresses = _candidates(tables)
    outside = Intervals(regions).inside(addresses).region == NONE
    matches = traces.match_live(trace, addresses[outside].tolist())
    ordinals = {match[0] for pair in matches.values() for match in pair if match is not None}
    live = traces.live_blocks(trace)
    blocks = [SymbolRegion(f"alloc#{i}", live[i][1], live[i][0]) for i in sorted(ordinals)]
    named = Intervals(regions).inside(np.array([b.base for b in blocks], np.uint64)).region
    return [b for b, covered in zip(blocks, named, strict=True) if covered == NONE]


def _contents(driver: DriverApi, regions: Iterable[SymbolRegion]) -> dict[int, bytes]:
    return {r.base: driver.read(r.base, r.size) for r in regions if r.size <= CONTENT_LIMIT}


def _decode_maps(driver: DriverApi, tables: Tables) -> Array:
    """Return the addresses in tensor maps, found by asking the driver where it writes each address bit."""
    rows: list[tuple[int, int, Array]] = []
    masks: list[int] = []
    for place in windows.maps(tables).tolist():
        descriptor = tables.payload[place : place + TENSOR_MAP_BYTES].tobytes()
        try:
            masks = masks or bit_masks(driver, descriptor)
            address = decode_map(driver, descriptor, masks)
        except DriverError:  # these 128 bytes are not a tensor map
            continue
        if address is not None:
            rows.append((place, address, _coded(masks)))
    return np.array(rows, MAP)


def _coded(masks: Sequence[int]) -> Array:
    """Return which bytes of a map encode an address bit."""
    union = functools.reduce(operator.or_, masks, 0)
    coded: Array = np.frombuffer(union.to_bytes(TENSOR_MAP_BYTES, "little"), np.uint8) != 0
    return coded


def bit_masks(driver: DriverApi, descriptor: bytes) -> list[int]:
    """Return the descriptor bits that each address bit 0..47 sets (none below bit 4: addresses are aligned).

    The address is never 0: a driver may reject it.
    """
    masks = [0, 0, 0, 0]
    for bit in range(4, 48):
        other = AWAY if 1 << bit != AWAY else AWAY >> 1
        masks.append(_moved(driver, descriptor, other | 1 << bit) ^ _moved(driver, descriptor, other))
    return masks


def _moved(driver: DriverApi, descriptor: bytes, address: int) -> int:
    return int.from_bytes(driver.move_tensor_map(descriptor, address), "little")


def decode_map(driver: DriverApi, descriptor: bytes, masks: Sequence[int]) -> int | None:
    """Return the device address in a tensor map, or None if writing that address again does not give the same bytes."""
    changed = int.from_bytes(descriptor, "little") ^ _moved(driver, descriptor, AWAY)
    address = AWAY ^ sum(1 << bit for bit, mask in enumerate(masks) if mask and changed & mask == mask)
    return address if address and driver.move_tensor_map(descriptor, address) == descriptor else None
