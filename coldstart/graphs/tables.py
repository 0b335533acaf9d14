"""Graphs as numpy tables, in memory and on disk, with one row for each node, edge and relocation.

A word is 8 bytes of a graph's parameters that could be an address.

On disk, tables.npz contains all arrays. graphs.json contains all other data, the SHA-256 of tables.npz, and its own
SHA-256 (the seal). Invariant: load(save(t)) == t, and `load` raises AlteredTableError after any byte of any file has
changed.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from coldstart.artifacts import canonical, files
from coldstart.graphs.errors import AlteredTableError, GraphError

Array = npt.NDArray[Any]
Attributes = tuple[tuple[int, str], ...]

NODE = np.dtype(
    [("kind", "u1"), ("flags", "u1"), ("attributes", "<u2"), ("kernel", "<u4"), ("grid", "<u4", 3),
     ("block", "<u2", 3), ("size", "<u2"), ("shared", "<u4"), ("payload", "<u4")]
)  # fmt: skip
EDGE = np.dtype(
    [("source", "<u4"), ("target", "<u4"), ("from_port", "u1"), ("to_port", "u1"), ("type", "u1"), ("reserved", "u1")]
)  # fmt: skip
RELOCATION = np.dtype(
    [("place", "<u4"), ("region", "<u2"), ("kind", "u1"), ("reserved", "u1"), ("offset", "<i8")]
)
BLOCK = np.dtype([("region", "<u4"), ("length", "<u4"), ("offset", "<u8"), ("start", "<u8")])
# Members of CUDA_MEMSET_NODE_PARAMS and CUDA_MEMCPY3D.
MEMSET = np.dtype(
    [("dst", "<u8"), ("pitch", "<u8"), ("value", "<u4"), ("elementSize", "<u4"), ("width", "<u8"), ("height", "<u8")]
)  # fmt: skip
MEMCPY = np.dtype(
    [("srcDevice", "<u8"), ("dstDevice", "<u8"), ("WidthInBytes", "<u8"), ("Height", "<u8"), ("Depth", "<u8"),
     ("srcPitch", "<u8"), ("srcHeight", "<u8"), ("dstPitch", "<u8"), ("dstHeight", "<u8")]
)  # fmt: skip
BYTES = np.dtype("u1")
PARTS = {"nodes": NODE, "edges": EDGE, "payload": BYTES, "relocations": RELOCATION}
GRAPH = np.dtype([("size", "<u4"), *((name, "<u4") for name in PARTS)])
CONTENTS = {"blocks": BLOCK, "contents": BYTES, "content_relocations": RELOCATION}

NO_KERNEL = 0xFFFFFFFF
HOST, DEVICE = "host", "device"
NONE = -1
STRIDE, MAP_STRIDE = 4, 64
LOWEST, HIGHEST = 1 << 32, 1 << 48
ABSOLUTE, TENSOR_MAP = 0, 1
TENSOR_MAP_BYTES = 128
FORMAT = 5
MANIFEST, ARRAYS, KERNELS = "graphs.json", "tables.npz", "kernels"


@dataclass(frozen=True)
class Kernel:
    """Kernel, identified by mangled name and SHA-256 of its binary. `layout` has the (offset, size) of each parameter."""

    name: str
    binary: str | None
    layout: tuple[tuple[int, int], ...]
    attributes: tuple[tuple[int, int], ...] = ()
    mutable_globals: bool = False

    @property
    def size(self) -> int:
        """Return the size of the packed parameter buffer in bytes."""
        return max((offset + size for offset, size in self.layout), default=0)


@dataclass(frozen=True)
class SymbolRegion:
    """Memory region with a name that is the same in every process; `base` is its address in this process.

    A process finds the memory of param:, buffer:, kv: and static: by name. The bundle provides pool: (a segment of the
    graphs' pool), alloc: (another allocation of the framework) and lib: (an allocation of a library). HOST and DEVICE are
    allocations that the driver reports.
    """

    symbol: str
    size: int
    base: int = 0

    @property
    def is_provided(self) -> bool:
        """Return whether the bundle provides this memory and its contents."""
        return self.symbol.startswith(("pool:", "alloc:", "lib:"))


@dataclass
class Graph:
    """Graph of batch size `size`. A node n has payload[n.payload : n.payload + n.size], and edges connect node indices.

    A relocation is a word in the payload that is the address of `region` plus `offset`.
    """

    size: int
    nodes: Array
    edges: Array
    payload: Array
    relocations: Array = field(default_factory=lambda: np.zeros(0, RELOCATION))

    def kernels(self) -> list[int]:
        """Return the indices of the kernels that this graph launches."""
        numbers: list[int] = np.unique(self.nodes["kernel"][self.nodes["kind"] == 0]).tolist()
        return numbers


@dataclass
class Tables:
    """Graphs of one model by key, their shared data, and the reasons for refused graphs, which must be captured.

    `blocks` are (region, length, offset in the region, start in `contents`). `content_relocations` are the relocations of
    addresses in `contents`.
    """

    graphs: dict[str, Graph] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)
    attributes: list[Attributes] = field(default_factory=lambda: [()])
    regions: list[SymbolRegion] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    blocks: Array = field(default_factory=lambda: np.zeros(0, BLOCK))
    contents: Array = field(default_factory=lambda: np.zeros(0, BYTES))
    content_relocations: Array = field(default_factory=lambda: np.zeros(0, RELOCATION))

    def drop_graphs(self, reasons: Mapping[str, str]) -> Tables:
        """Return the tables without the graphs in `reasons`, which are marked as refused for the given reasons."""
        kept = {key: graph for key, graph in self.graphs.items() if key not in reasons}
        return replace(self, graphs=kept, refused={**self.refused, **reasons})


@dataclass
class Manifest:
    """Contents of graphs.json."""

    format: int
    tables: str
    binaries: list[str]
    keys: list[str]
    kernels: list[Kernel]
    attributes: list[Attributes]
    regions: list[SymbolRegion]
    refused: dict[str, str]
    report: dict[str, Any]
    seal: str


def sha256(data: bytes) -> str:
    """Return the SHA-256 digest in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def save(tables: Tables, directory: Path, binaries: Mapping[str, bytes]) -> str:
    """Write the tables and kernel binaries to `directory`, which is created if needed. Return the seal."""
    (directory / KERNELS).mkdir(parents=True, exist_ok=True)
    for digest, data in binaries.items():
        (directory / KERNELS / digest).write_bytes(data)
    graphs, packed = list(tables.graphs.values()), io.BytesIO()
    arrays = {
        name: np.concatenate([np.zeros(0, dtype), *(getattr(graph, name) for graph in graphs)])
        for name, dtype in PARTS.items()
    }
    counts = np.array([(g.size, *(len(getattr(g, name)) for name in PARTS)) for g in graphs], GRAPH)
    np.savez(packed, graphs=counts, **arrays, **{name: getattr(tables, name) for name in CONTENTS})
    (directory / ARRAYS).write_bytes(packed.getvalue())
    shared = {name: getattr(tables, name) for name in ("attributes", "refused", "report")}
    regions = [asdict(replace(region, base=0)) for region in tables.regions]
    manifest = shared | {
        "format": FORMAT, "tables": sha256(packed.getvalue()), "binaries": sorted(binaries),
        "keys": list(tables.graphs), "kernels": [asdict(k) for k in tables.kernels], "regions": regions,
    }  # fmt: skip
    seal = sha256(canonical.serialize(manifest))
    (directory / MANIFEST).write_bytes(canonical.serialize(manifest | {"seal": seal}))
    return seal


def read_file(path: Path) -> bytes:
    """Return the bytes of a regular file. Raises OSError for other files, such as pipes, because reading them could block."""
    with files.open_regular(path) as file:
        return file.read()


def read_manifest(directory: Path) -> Manifest:
    """Read graphs.json. Raises AlteredTableError if it is truncated or changed, or has an unsupported format."""
    try:
        document = json.loads(read_file(directory / MANIFEST))
        unsealed = {name: value for name, value in document.items() if name != "seal"}
        if document["seal"] != sha256(canonical.serialize(unsealed)):
            raise AlteredTableError(f"{MANIFEST} does not match the digest that it contains")
        if (found := document.get("format")) != FORMAT:
            raise AlteredTableError(f"{MANIFEST} has format {found}, but this version reads format {FORMAT}")
        return msgspec.convert(document, Manifest)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise AlteredTableError(f"cannot read {MANIFEST}: {error}") from error


def load(directory: Path) -> Tables:
    """Load the tables in a directory. Raises AlteredTableError if a file is corrupt or missing."""
    manifest = read_manifest(directory)
    try:
        packed = read_file(directory / ARRAYS)
        if sha256(packed) != manifest.tables:
            raise AlteredTableError(f"{ARRAYS} does not match its digest")
        with np.load(io.BytesIO(packed), allow_pickle=False) as held:
            arrays = {name: held[name] for name in ("graphs", *PARTS, *CONTENTS)}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise AlteredTableError(f"cannot read {ARRAYS}: {error}") from error
    counts = arrays.pop("graphs")
    if counts.dtype != GRAPH or len(counts) != len(set(manifest.keys)):
        raise AlteredTableError(f"invalid {ARRAYS}: expected one graph for each key")
    parts = {name: _split(arrays.pop(name), counts[name], name) for name in PARTS}
    graphs = [
        Graph(int(row["size"]), **{name: parts[name][number] for name in PARTS})
        for number, row in enumerate(counts)
    ]
    shared = {f.name: getattr(manifest, f.name) for f in fields(Tables) if hasattr(manifest, f.name)}
    return Tables(**shared | arrays | {"graphs": dict(zip(manifest.keys, graphs, strict=True))})


def _split(rows: Array, counts: Array, name: str) -> list[Array]:
    ends = np.cumsum(counts.astype(np.int64))
    if (int(ends[-1]) if len(ends) else 0) != len(rows):
        raise AlteredTableError(f"invalid {ARRAYS}: the graphs do not cover all rows of {name}")
    return np.split(rows, ends[:-1])


def read_by_digest(directory: Path, digest: str) -> bytes:
    """Read a file whose name is its digest, and verify it. Raises AlteredTableError if it is missing or does not match."""
    try:
        data = read_file(directory / digest)
    except OSError as error:
        raise AlteredTableError(f"cannot read {directory.name}/{digest[:12]}: {error}") from error
    if sha256(data) != digest:
        raise AlteredTableError(f"{directory.name}/{digest[:12]} does not match its digest")
    return data


def replace_tables(tables: Tables, directory: Path) -> str:
    """Replace the tables of a bundle, keep its binaries, and return the new seal. Raises AlteredTableError."""
    place = directory / KERNELS
    return save(tables, directory, {d: read_by_digest(place, d) for d in read_manifest(directory).binaries})


# --- words -----------------------------------------------------------------------------------------


def find_word_offsets(graph: Graph, kernels: Sequence[Kernel], stride: int = STRIDE) -> Array:
    """Return the sorted payload offsets (int64) of the 8-byte words within one parameter that could be addresses."""
    parts = _find_windows(graph, kernels, 8, stride)
    for kind, offsets in ((1, (0, 8)), (2, (0,))):
        starts = graph.nodes["payload"][graph.nodes["kind"] == kind].astype(np.int64)
        parts.append((starts[:, None] + np.array(offsets)).ravel())
    return np.sort(np.concatenate(parts))


def find_tensor_map_offsets(graph: Graph, kernels: Sequence[Kernel]) -> Array:
    """Return the sorted payload offsets at which a tensor map could be, either alone or in a struct.

    The alignment is relative to the start of the parameter: the compiler aligns the parameter in the constant bank, but
    not in the packed buffer.
    """
    return np.sort(np.concatenate(_find_windows(graph, kernels, TENSOR_MAP_BYTES, MAP_STRIDE)))


def _find_windows(graph: Graph, kernels: Sequence[Kernel], width: int, stride: int) -> list[Array]:
    """Return the offsets of all windows of `width` bytes, `stride` bytes apart, that lie within one parameter of a launch."""
    found = [np.zeros(0, np.int64)]
    for number in graph.kernels():
        launched = (graph.nodes["kind"] == 0) & (graph.nodes["kernel"] == number)
        start = graph.nodes["payload"][launched].astype(np.int64)[:, None]
        for at, size in kernels[number].layout:
            found.append((start + np.arange(at, at + size - width + 1, stride)).ravel())
    return found


def values(payload: Array, at: Array) -> Array:
    """Return the 8-byte little-endian words of `payload` at the offsets `at`, which need not be aligned."""
    gathered = np.ascontiguousarray(payload[at[:, None] + np.arange(8)])
    return gathered.view("<u8").reshape(-1)


class Intervals:
    """Index of disjoint memory regions by address."""

    def __init__(self, regions: Sequence[SymbolRegion]) -> None:
        self.order = np.argsort([r.base for r in regions], kind="stable").astype(np.int64)
        self.base = np.array([regions[i].base for i in self.order], np.uint64)
        self.size = np.array([regions[i].size for i in self.order], np.uint64)
        overlap = self.base[:-1] + self.size[:-1] > self.base[1:]
        if overlap.any():
            first = regions[self.order[int(np.argmax(overlap))]]
            raise GraphError(f"region {first.symbol} overlaps the next region")

    def find(self, addresses: Array) -> Array:
        """Return, for each address, the index of the region that contains it, or NONE."""
        if not len(self.base):
            return np.full(len(addresses), NONE)
        at = np.searchsorted(self.base, addresses, side="right") - 1
        safe = np.maximum(at, 0)
        hit = (at >= 0) & (addresses - self.base[safe] < self.size[safe])
        return np.where(hit, self.order[safe], NONE)
