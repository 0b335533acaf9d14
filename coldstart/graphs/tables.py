"""The graph representation: flat numpy tables, one row per node, edge, relocation and content block.

Layout invariant: graph g owns nodes[g.node : g.node + g.nodes], likewise edges and relocations; a node owns
payload[n.payload : n.payload + n.size]; edge ends are node numbers inside their graph; relocation places are
byte positions inside the whole payload.  36 bytes a node, 12 an edge, 16 a relocation, plus the payload.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from coldstart.graphs.errors import AlteredTableError

Array = npt.NDArray[Any]

GRAPH = np.dtype(
    [("size", "<u4"), ("node", "<u4"), ("nodes", "<u4"), ("edge", "<u4"), ("edges", "<u4"),
     ("relocation", "<u4"), ("relocations", "<u4"), ("reserved", "<u4")]
)  # fmt: skip
NODE = np.dtype(
    [("kind", "u1"), ("flags", "u1"), ("attributes", "<u2"), ("kernel", "<u4"), ("grid", "<u4", 3),
     ("block", "<u2", 3), ("size", "<u2"), ("shared", "<u4"), ("payload", "<u4")]
)  # fmt: skip
EDGE = np.dtype(
    [
        ("source", "<u4"),
        ("target", "<u4"),
        ("from_port", "u1"),
        ("to_port", "u1"),
        ("type", "u1"),
        ("reserved", "u1"),
    ]
)
RELOCATION = np.dtype(
    [("place", "<u4"), ("region", "<u2"), ("kind", "u1"), ("reserved", "u1"), ("offset", "<i8")]
)
BLOCK = np.dtype([("region", "<u4"), ("length", "<u4"), ("offset", "<u8"), ("start", "<u8")])
ASSUMED = np.dtype([("graph", "<u4"), ("end_of", "<u2"), ("start_of", "<u2")])
MEMSET = np.dtype(
    [
        ("target", "<u8"),
        ("pitch", "<u8"),
        ("value", "<u4"),
        ("element", "<u4"),
        ("width", "<u8"),
        ("height", "<u8"),
    ]
)
MEMCPY = np.dtype(
    [("source", "<u8"), ("target", "<u8"), ("width", "<u8"), ("height", "<u8"), ("depth", "<u8"),
     ("source_pitch", "<u8"), ("source_height", "<u8"), ("target_pitch", "<u8"), ("target_height", "<u8")]
)  # fmt: skip

NO_KERNEL = 0xFFFFFFFF
ABSOLUTE, TENSOR_MAP = 0, 1
TENSOR_MAP_BYTES = 128


@dataclass(frozen=True)
class Kernel:
    """Identity is (sha256 of the binary, mangled name); `layout` is ((offset, size), ...) in bytes."""

    name: str
    binary: str | None
    layout: tuple[tuple[int, int], ...]
    attributes: tuple[tuple[int, int], ...] = ()
    library: str | None = None
    mutable_globals: bool = False

    @property
    def size(self) -> int:
        """Bytes of the packed parameter buffer."""
        return max((offset + size for offset, size in self.layout), default=0)


@dataclass(frozen=True)
class SymbolRegion:
    """A symbol of the linker: `size` bytes that every process holds somewhere; `base` in this process."""

    symbol: str
    size: int
    base: int = 0


Attributes = tuple[tuple[int, str], ...]


@dataclass
class Tables:
    """All graphs of one model. Arrays may be memory maps; nothing here writes to them."""

    graphs: Array
    nodes: Array
    edges: Array
    relocations: Array
    payload: Array
    blocks: Array
    contents: Array
    content_relocations: Array
    assumed: Array
    keys: list[str]
    kernels: list[Kernel]
    attributes: list[Attributes]
    regions: list[SymbolRegion]
    refused: dict[str, str] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)

    def graph(self, index: int) -> tuple[Array, Array, Array]:
        """Nodes, edges and relocations of one graph, as views."""
        g = self.graphs[index]
        return (
            self.nodes[g["node"] : g["node"] + g["nodes"]],
            self.edges[g["edge"] : g["edge"] + g["edges"]],
            self.relocations[g["relocation"] : g["relocation"] + g["relocations"]],
        )

    def bytes_per_node(self) -> float:
        """All bytes that grow with nodes, divided by the nodes."""
        tables = (self.graphs, self.nodes, self.edges, self.relocations, self.payload)
        return sum(t.nbytes for t in tables) / max(1, len(self.nodes))


def empty_tables() -> Tables:
    """No graphs at all."""
    zero: dict[str, Any] = {name: np.zeros(0, dtype) for name, dtype in ARRAYS.items()}
    return Tables(**zero, keys=[], kernels=[], attributes=[()], regions=[])


ARRAYS: dict[str, np.dtype[Any]] = {
    "graphs": GRAPH, "nodes": NODE, "edges": EDGE, "relocations": RELOCATION, "payload": np.dtype("u1"),
    "blocks": BLOCK, "contents": np.dtype("u1"), "content_relocations": RELOCATION,
    "assumed": ASSUMED,
}  # fmt: skip


def _need(condition: object, what: str) -> None:
    if not bool(condition):
        raise AlteredTableError(f"graph tables: {what}")


def _tiles(starts: Array, counts: Array, total: int) -> bool:
    """Whether the slices follow one another and cover exactly `total` rows."""
    ends = starts.astype(np.int64) + counts
    expected = np.concatenate([[0], ends])
    return bool(np.array_equal(starts, expected[:-1]) and expected[-1] == total)


def check(tables: Tables) -> None:
    """Raise AlteredTableError unless every index of every table lies inside the table that it names."""
    for name, dtype in ARRAYS.items():
        array = getattr(tables, name)
        _need(array.dtype == dtype and array.ndim == 1, f"{name} has another type or shape")
    _need(len(tables.keys) == len(tables.graphs) == len(set(tables.keys)), "keys and graphs differ")
    _check_slices(tables)
    _check_nodes(tables)
    _check_edges(tables)
    _check_relocations(tables)
    _check_contents(tables)
    _check_assumed(tables)


def _check_slices(t: Tables) -> None:
    g = t.graphs
    _need(_tiles(g["node"], g["nodes"], len(t.nodes)), "nodes are not tiled by graphs")
    _need(_tiles(g["edge"], g["edges"], len(t.edges)), "edges are not tiled by graphs")
    _need(
        _tiles(g["relocation"], g["relocations"], len(t.relocations)), "relocations are not tiled by graphs"
    )


def _check_nodes(t: Tables) -> None:
    n = t.nodes
    _need((n["payload"].astype(np.int64) + n["size"] <= len(t.payload)).all(), "a node's payload is outside")
    _need((n["attributes"] < len(t.attributes)).all(), "a node names no attributes")
    kernel = n["kind"] == 0
    _need((n["kernel"][kernel] < len(t.kernels)).all(), "a node names no kernel")
    sizes = np.array([k.size for k in t.kernels] or [0])
    if kernel.any():
        _need((sizes[n["kernel"][kernel]] == n["size"][kernel]).all(), "a payload is not its kernel's size")
    _need((n["size"][n["kind"] == 1] == MEMCPY.itemsize).all(), "a copy's payload has another size")
    _need((n["size"][n["kind"] == 2] == MEMSET.itemsize).all(), "a memset's payload has another size")
    _need(np.isin(n["kind"], (0, 1, 2, 5)).all(), "a node has an unsupported kind")
    _need((n["payload"] % 16 == 0).all(), "a payload is not aligned")


def _check_edges(t: Tables) -> None:
    limit = np.repeat(t.graphs["nodes"], t.graphs["edges"])
    _need((t.edges["source"] < limit).all() and (t.edges["target"] < limit).all(), "an edge ends outside")


def _spans(t: Tables, relocations: Array, sizes: Array, room: int) -> None:
    width = np.where(relocations["kind"] == TENSOR_MAP, TENSOR_MAP_BYTES, 8)
    _need((relocations["place"] + width.astype(np.int64) <= room).all(), "a relocation is outside")
    _need((relocations["region"] < len(t.regions)).all(), "a relocation names no region")
    _need((relocations["kind"] <= TENSOR_MAP).all(), "a relocation has an unknown kind")
    inside = (relocations["offset"] >= 0) & (relocations["offset"] <= sizes[relocations["region"]])
    _need(inside.all(), "a relocation points outside its region")


def _check_relocations(t: Tables) -> None:
    sizes = np.array([r.size for r in t.regions] or [0], dtype=np.int64)
    _spans(t, t.relocations, sizes, len(t.payload))
    _spans(t, t.content_relocations, sizes, len(t.contents))
    owner = np.searchsorted(t.nodes["payload"], t.relocations["place"], side="right") - 1
    _need((owner >= 0).all(), "a relocation belongs to no node")
    graph = np.repeat(np.arange(len(t.graphs)), t.graphs["relocations"])
    node_graph = np.repeat(np.arange(len(t.graphs)), t.graphs["nodes"])
    _need((node_graph[owner] == graph).all() if len(owner) else True, "a relocation is in another graph")


def _check_assumed(t: Tables) -> None:
    a, count = t.assumed, len(t.regions)
    _need((a["graph"] < len(t.graphs)).all(), "an assumption names no graph")
    _need((a["end_of"] < count).all() and (a["start_of"] < count).all(), "an assumption names no region")


def _check_contents(t: Tables) -> None:
    sizes = np.array([r.size for r in t.regions] or [0], dtype=np.int64)
    b = t.blocks
    _need((b["region"] < len(t.regions)).all(), "a content block names no region")
    _need(
        (b["offset"].astype(np.int64) + b["length"] <= sizes[b["region"]]).all(),
        "a content block is too long",
    )
    _need((b["start"].astype(np.int64) + b["length"] <= len(t.contents)).all(), "contents are cut short")
