"""The simulated driver: lazy modules, hidden kernels, stream capture, replay in a random legal order."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coldstart.graphs.api import Edge, KernelNode, NodeKind, Range
from coldstart.graphs.elf import read_cubin, sections
from coldstart.graphs.errors import DriverFailure, Refused
from coldstart.graphs.sim.kernels import execute, pack_map
from coldstart.graphs.sim.memory import Memory
from coldstart.graphs.store import sha256
from coldstart.graphs.table import MEMCPY, MEMSET, Array, Attributes, Kernel

MAX_DYNAMIC_SHARED = 8
DEFAULT_SHARED = 48 << 10


@dataclass
class Function:
    """A loaded kernel; attributes are per function, as in the driver."""

    kernel: Kernel
    routine: str
    attributes: dict[int, int] = field(default_factory=dict)


@dataclass
class Node:
    """One graph node; `payload` holds packed parameters or a MEMSET or MEMCPY row."""

    kind: NodeKind
    payload: bytes = b""
    function: int = 0
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    shared: int = 0
    attributes: Attributes = ()


@dataclass
class Graph:
    """Node handles in order of creation, and edges."""

    nodes: list[int] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)


@dataclass(frozen=True)
class Library:
    """A shipped binary; `exported` is whether dlsym sees its kernels."""

    name: str
    image: bytes
    exported: bool


class SimDriver:
    """Implements DriverApi, and the launching side that a framework uses."""

    def __init__(self, seed: int, libraries: Sequence[Library] = (), *, fixed_bases: bool = False) -> None:
        self.rng = random.Random(seed)
        self.memory = Memory(self.rng, fixed=fixed_bases)
        self.libraries = {library.name: library for library in libraries}
        self.objects: dict[int, Any] = {}
        self._images: dict[str, bytes] = {}
        self._loaded: dict[str, dict[str, int]] = {}
        self.capturing: Graph | None = None
        self._frontier: dict[int, list[Edge]] = {}
        self.launches = 0

    def _handle(self, value: Any) -> int:
        while (handle := self.rng.randrange(1 << 32, 1 << 46, 16)) in self.objects:
            continue
        self.objects[handle] = value
        return handle

    def _get(self, handle: int, kind: type[Any], call: str) -> Any:
        value = self.objects.get(handle)
        if not isinstance(value, kind):
            raise DriverFailure(call, "INVALID_HANDLE")
        return value

    def adopt_thread(self) -> None:
        return None

    # --- modules -------------------------------------------------------------------------------------
    def function(self, library: str, name: str) -> int:
        """Load the module lazily, as the first launch of any of its kernels does."""
        if library not in self._loaded:
            self._loaded[library] = self._load(self.libraries[library].image, library)
        return self._loaded[library][name]

    def _load(self, image: bytes, library: str | None) -> dict[str, int]:
        parsed, digest = read_cubin(image), sha256(image)
        self._images[digest] = image
        bodies = {name: _body(image, name) for name in parsed.kernels}
        mutable = bool(parsed.mutable_globals)
        return {
            name: self._handle(Function(Kernel(name, digest, layout, (), library, mutable), bodies[name]))
            for name, layout in parsed.kernels.items()
        }

    def kernel(self, function: int) -> Kernel:
        loaded: Function = self._get(function, Function, "cuFuncGetName")
        k = loaded.kernel
        attributes = tuple(sorted(loaded.attributes.items()))
        return Kernel(k.name, k.binary, k.layout, attributes, k.library, k.mutable_globals)

    def binary(self, digest: str) -> bytes:
        return self._images[digest]

    def load_library(self, image: bytes) -> int:
        return self._handle(self._load(image, None))

    def library_kernel(self, library: int, name: str) -> int:
        found: dict[str, int] = self._get(library, dict, "cuLibraryGetKernel")
        if name not in found:
            raise DriverFailure("cuLibraryGetKernel", "NOT_FOUND")
        return found[name]

    def loaded_functions(self) -> list[int]:
        return [h for functions in self._loaded.values() for h in functions.values()]

    def exported(self, name: str, library: str | None) -> int | None:
        entry = self.libraries.get(library or "")
        if entry is None or not entry.exported or name not in read_cubin(entry.image).kernels:
            return None
        return self.function(entry.name, name)

    def set_function_attributes(self, function: int, attributes: Sequence[tuple[int, int]]) -> None:
        self._get(function, Function, "cuFuncSetAttribute").attributes.update(dict(attributes))

    # --- launching and capture -----------------------------------------------------------------------
    def begin_capture(self) -> None:
        """Every launch from here until end_capture becomes a node."""
        self.capturing, self._frontier = Graph(), {}

    def end_capture(self) -> int:
        """The captured graph."""
        graph, self.capturing = self.capturing, None
        return self._handle(graph)

    def submit(self, node: Node, stream: int = 0, edge_type: int = 0) -> None:
        """Run now, or record behind the stream's last nodes."""
        self.launches += 1
        if self.capturing is None:
            self._run(node)
            return
        handle = self._handle(node)
        port = 1 if edge_type else 0
        for last in self._frontier.get(stream, []):
            kind = edge_type or last.type
            self.capturing.edges.append(Edge(last.source, handle, port or last.from_port, 0, kind))
        self.capturing.nodes.append(handle)
        self._frontier[stream] = [Edge(handle, 0)]

    def wait(self, stream: int, other: int) -> None:
        """Work submitted to `stream` from here on follows what `other` holds."""
        mine = self._frontier.setdefault(stream, [])
        mine.extend(e for e in self._frontier.get(other, []) if e not in mine)

    def _run(self, node: Node) -> None:
        if node.kind == NodeKind.KERNEL:
            execute(self.memory, self._get(node.function, Function, "launch").routine, node.payload)
        elif node.kind == NodeKind.MEMSET:
            row = np.frombuffer(node.payload, MEMSET)[0]
            self.memory.view(int(row["target"]), int(row["width"] * row["element"]))[:] = row["value"] & 0xFF
        elif node.kind == NodeKind.MEMCPY:
            row = np.frombuffer(node.payload, MEMCPY)[0]
            size = int(row["width"])
            self.memory.view(int(row["target"]), size)[:] = self.memory.view(int(row["source"]), size)

    # --- reading graphs ------------------------------------------------------------------------------
    def nodes(self, graph: int) -> list[int]:
        return list(self._get(graph, Graph, "cuGraphGetNodes").nodes)

    def edges(self, graph: int) -> list[Edge]:
        return list(self._get(graph, Graph, "cuGraphGetEdges").edges)

    def kind(self, node: int) -> int:
        return int(self._get(node, Node, "cuGraphNodeGetType").kind)

    def kernel_node(self, node: int) -> KernelNode:
        n: Node = self._get(node, Node, "cuGraphKernelNodeGetParams")
        return KernelNode(n.function, n.grid, n.block, n.shared, n.payload, n.attributes)

    def memset_node(self, node: int) -> bytes:
        return bytes(self._get(node, Node, "cuGraphMemsetNodeGetParams").payload)

    def memcpy_node(self, node: int) -> bytes:
        payload = bytes(self._get(node, Node, "cuGraphMemcpyNodeGetParams").payload)
        row = np.frombuffer(payload, MEMCPY)[0]
        ranges = [self.memory.range(int(row[end])) for end in ("source", "target")]
        if any(r is None or r.host for r in ranges):
            raise Refused("memory copy to or from host memory")
        return payload

    # --- building graphs -----------------------------------------------------------------------------
    def new_graph(self) -> int:
        return self._handle(Graph())

    def _add(self, graph: int, node: Node) -> int:
        owner: Graph = self._get(graph, Graph, "cuGraphAddNode")
        handle = self._handle(node)
        owner.nodes.append(handle)
        return handle

    def add_kernels(self, graph: int, rows: Array) -> list[int]:
        return [self._add(graph, self._kernel_from_row(row)) for row in rows]

    def _kernel_from_row(self, row: Any) -> Node:
        function = int(row["function"]) or int(row["kernel"])
        layout = self._get(function, Function, "cuGraphAddKernelNode").kernel.layout
        end = max((offset + size for offset, size in layout), default=0)
        payload = bytearray(end)
        pointers = (ctypes.c_uint64 * len(layout)).from_address(int(row["params"])) if layout else ()
        for address, (offset, size) in zip(pointers, layout, strict=True):
            payload[offset : offset + size] = ctypes.string_at(address, size)
        grid, block = (tuple(int(v) for v in row[name]) for name in ("grid", "block"))
        return Node(NodeKind.KERNEL, bytes(payload), function, grid, block, int(row["shared"]))  # type: ignore[arg-type]

    def add_memset(self, graph: int, row: Array) -> int:
        return self._add(graph, Node(NodeKind.MEMSET, row.tobytes()))

    def add_memcpy(self, graph: int, row: Array) -> int:
        return self._add(graph, Node(NodeKind.MEMCPY, row.tobytes()))

    def add_empty(self, graph: int) -> int:
        return self._add(graph, Node(NodeKind.EMPTY))

    def set_attributes(self, node: int, attributes: Attributes) -> None:
        self._get(node, Node, "cuGraphKernelNodeSetAttribute").attributes = attributes

    def add_edges(self, graph: int, nodes: Sequence[int], edges: Array) -> None:
        owner: Graph = self._get(graph, Graph, "cuGraphAddDependencies")
        rows = (row[:5] for row in edges.tolist())
        owner.edges += [Edge(nodes[a], nodes[b], *data) for a, b, *data in rows]

    def instantiate(self, graph: int) -> int:
        source: Graph = self._get(graph, Graph, "cuGraphInstantiate")
        for handle in source.nodes:
            self._check_shared(self.objects[handle])
        return self._handle([self.objects[h] for h in self._order(source)])

    def _check_shared(self, node: Node) -> None:
        if node.kind != NodeKind.KERNEL or node.shared <= DEFAULT_SHARED:
            return
        if self.objects[node.function].attributes.get(MAX_DYNAMIC_SHARED, 0) < node.shared:
            raise DriverFailure("cuGraphInstantiate", "INVALID_VALUE")

    def _order(self, graph: Graph) -> list[int]:
        waiting = dict.fromkeys(graph.nodes, 0)
        after: dict[int, list[int]] = {h: [] for h in graph.nodes}
        for edge in graph.edges:
            waiting[edge.target] += 1
            after[edge.source].append(edge.target)
        ready, order = [h for h, count in waiting.items() if not count], []
        while ready:
            order.append(handle := ready.pop(self.rng.randrange(len(ready))))
            for target in after[handle]:
                waiting[target] -= 1
                if not waiting[target]:
                    ready.append(target)
        if len(order) != len(graph.nodes):
            raise DriverFailure("cuGraphInstantiate", "INVALID_VALUE: the graph has a cycle")
        return order

    def launch(self, executable: int, stream: int) -> None:
        for node in self._get(executable, list, "cuGraphLaunch"):
            self._run(node)

    def destroy(self, graph: int, executable: int) -> None:
        self.objects.pop(executable, None)
        built = self.objects.pop(graph, None)
        for handle in built.nodes if isinstance(built, Graph) else ():
            self.objects.pop(handle, None)

    # --- memory --------------------------------------------------------------------------------------
    def allocate(self, size: int) -> int:
        return self.memory.allocate(size)

    def free(self, address: int) -> None:
        self.memory.free(address)

    def address_range(self, address: int) -> Range | None:
        return self.memory.range(address)

    def read(self, address: int, size: int) -> bytes:
        return self.memory.view(address, size).tobytes()

    def write(self, address: int, data: bytes) -> None:
        self.memory.view(address, len(data))[:] = np.frombuffer(data, np.uint8)

    def fill(self, address: int, size: int, value: int) -> None:
        self.memory.view(address, size)[:] = value

    def synchronize(self) -> None:
        return None

    def move_tensor_map(self, descriptor: bytes, address: int) -> bytes:
        if len(descriptor) != 128:
            raise DriverFailure("cuTensorMapReplaceAddress", "INVALID_VALUE")
        return pack_map(address, 0, 0)[:8] + descriptor[8:]


def _body(image: bytes, name: str) -> str:
    """The routine a kernel's text names (the simulator's machine code)."""
    return next(s.data for s in sections(image) if s.name == f".text.{name}").decode()
