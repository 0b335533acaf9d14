"""The simulated driver over the launcher; graphs are replayed in a random legal order."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from coldstart.graphs.api import Edge, KernelNode, NodeKind
from coldstart.graphs.errors import DriverError, GraphRefusedError
from coldstart.graphs.tables import HOST, MEMCPY, Array, Attributes, SymbolRegion
from tests.support.graphs.kernels import pack_map
from tests.support.graphs.launcher import Function, Graph, Launcher, Library, Node

__all__ = ["Library", "Node", "SimDriver"]
MAX_DYNAMIC_SHARED = 8
DEFAULT_SHARED = 48 << 10


class SimDriver(Launcher):
    """Reads, builds and launches graphs."""

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
        if any(r is None or r.symbol == HOST for r in ranges):
            raise GraphRefusedError("memory copy to or from host memory")
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
            raise DriverError("cuGraphInstantiate", "INVALID_VALUE")

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
            raise DriverError("cuGraphInstantiate", "INVALID_VALUE: the graph has a cycle")
        return order

    def launch(self, executable: int, stream: int) -> None:
        for node in self._get(executable, list, "cuGraphLaunch"):
            self._run(node)

    def destroy(self, graph: int) -> None:
        built = self.objects.pop(graph, None)
        for handle in built.nodes if isinstance(built, Graph) else ():
            self.objects.pop(handle, None)

    # --- memory --------------------------------------------------------------------------------------
    def allocate(self, size: int) -> int:
        return self.memory.allocate(size)

    def free(self, address: int) -> None:
        self.memory.free(address)

    def address_range(self, address: int) -> SymbolRegion | None:
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
            raise DriverError("cuTensorMapReplaceAddress", "INVALID_VALUE")
        return pack_map(address, 0, 0)[:8] + descriptor[8:]
