"""DriverApi over cuda-bindings.

One kernel-parameter struct is reused: each node's 72 bytes are copied over it from the launch table, so a
node costs one memmove and one driver call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from coldstart.graphs.api import LAUNCH, Edge, KernelNode, NodeKind, Range
from coldstart.graphs.cuda.calls import bindings, bytes_at, call, primary_context
from coldstart.graphs.cuda.modules import ModuleLog
from coldstart.graphs.errors import DriverFailure, Refused
from coldstart.graphs.table import MEMCPY, MEMSET, Array, Attributes, Kernel

# Launch attributes that a captured node can carry: cooperative, cluster, scheduling, programmatic, priority,
# memory domain map and domain, preferred cluster, carve-out.
NODE_ATTRIBUTES = (2, 4, 5, 6, 8, 9, 10, 11, 14)
DEFAULTS = {9: b"\0\1", 14: b"\xff\xff\xff\xff"}
FUNCTION_ATTRIBUTES = (8, 9, 14)  # dynamic shared bytes, carve-out, non-portable cluster
MEMORY_HOST, MEMORY_DEVICE = 1, 2
EDGE_BYTES = 8


class CudaDriver:
    """The real driver. `modules` says which binary each function came from."""

    def __init__(self, modules: ModuleLog | None = None, ordinal: int = 0) -> None:
        self.d = bindings()
        self.modules = modules or ModuleLog()
        self.context = primary_context(ordinal)
        self._params = self.d.CUDA_KERNEL_NODE_PARAMS()
        self._kernels: dict[int, Kernel] = {}
        self._seen_modules: dict[int, list[int]] = {}
        probe = (2, 11, 12)
        self._range = [self.d.CUpointer_attribute(i) for i in probe]

    def adopt_thread(self) -> None:
        """Make the context current in the calling thread."""
        call(self.d.cuCtxSetCurrent, self.context)

    # --- reading -------------------------------------------------------------------------------------
    def nodes(self, graph: int) -> list[int]:
        handle = self.d.CUgraph(graph)
        count = call(self.d.cuGraphGetNodes, handle)[1]
        return [int(n) for n in call(self.d.cuGraphGetNodes, handle, count)[0]]

    def edges(self, graph: int) -> list[Edge]:
        handle = self.d.CUgraph(graph)
        count = call(self.d.cuGraphGetEdges, handle)[3]
        if not count:
            return []
        sources, targets, data, _ = call(self.d.cuGraphGetEdges, handle, count)
        rows = zip(sources, targets, data, strict=True)
        return [Edge(int(s), int(t), int(x.from_port), int(x.to_port), int(x.type)) for s, t, x in rows]

    def kind(self, node: int) -> int:
        return int(call(self.d.cuGraphNodeGetType, self.d.CUgraphNode(node)))

    def kernel_node(self, node: int) -> KernelNode:
        p = call(self.d.cuGraphKernelNodeGetParams, self.d.CUgraphNode(node))
        function = int(p.func) or int(call(self.d.cuKernelGetFunction, p.kern))
        grid = (int(p.gridDimX), int(p.gridDimY), int(p.gridDimZ))
        block = (int(p.blockDimX), int(p.blockDimY), int(p.blockDimZ))
        payload = self._payload(p, self.kernel(function))
        return KernelNode(function, grid, block, int(p.sharedMemBytes), payload, self._attributes(node))

    @staticmethod
    def _payload(p: Any, kernel: Kernel) -> bytes:
        """The packed parameters, from kernelParams or from the packed buffer of `extra`."""
        out = bytearray(kernel.size)
        if not int(p.kernelParams):
            return _extra(int(p.extra), kernel.size)
        pointers = (ctypes.c_uint64 * len(kernel.layout)).from_address(int(p.kernelParams))
        for address, (offset, size) in zip(pointers, kernel.layout, strict=True):
            out[offset : offset + size] = bytes_at(address, size)
        return bytes(out)

    def _attributes(self, node: int) -> Attributes:
        handle, found = self.d.CUgraphNode(node), []
        if self._attribute(handle, 1)[24:32].strip(b"\0"):
            raise Refused("a node has an access-policy window")
        for number in NODE_ATTRIBUTES:
            data = self._attribute(handle, number).rstrip(b"\0")
            if data and data != DEFAULTS.get(number):
                found.append((number, data.hex()))
        return tuple(found)

    def _attribute(self, node: Any, number: int) -> bytes:
        try:
            value = call(self.d.cuGraphKernelNodeGetAttribute, node, self.d.CUlaunchAttributeID(number))
        except DriverFailure as failure:
            if "INVALID_VALUE" in str(failure):  # an attribute that this driver does not keep on nodes
                return b"\0" * 64
            raise
        return bytes_at(value.getPtr(), 64)

    def memset_node(self, node: int) -> bytes:
        p = call(self.d.cuGraphMemsetNodeGetParams, self.d.CUgraphNode(node))
        row = np.zeros(1, MEMSET)
        row[0] = (int(p.dst), p.pitch, p.value, p.elementSize, p.width, p.height)
        return row.tobytes()

    def memcpy_node(self, node: int) -> bytes:
        p = call(self.d.cuGraphMemcpyNodeGetParams, self.d.CUgraphNode(node))
        sides = [self._copy_end(p, side) for side in ("src", "dst")]
        row = np.zeros(1, MEMCPY)
        row[0] = (*sides, p.WidthInBytes, p.Height, p.Depth, p.srcPitch, p.srcHeight, p.dstPitch, p.dstHeight)
        return row.tobytes()

    def _copy_end(self, p: Any, side: str) -> int:
        kind = int(getattr(p, f"{side}MemoryType"))
        if any(int(getattr(p, side + part)) for part in ("XInBytes", "Y", "Z", "LOD")):
            raise Refused("memory copy that starts inside an array")
        address = int(getattr(p, f"{side}Device"))
        held = self.address_range(address) if kind in (MEMORY_DEVICE, 4) else None
        if held is None or held.host:
            raise Refused("memory copy to or from host memory or an array")
        return address

    # --- functions -----------------------------------------------------------------------------------
    def kernel(self, function: int) -> Kernel:
        if function not in self._kernels:
            self._kernels[function] = self._describe(function)
        return self._kernels[function]

    def _describe(self, function: int) -> Kernel:
        handle = self.d.CUfunction(function)
        name = call(self.d.cuFuncGetName, handle).decode()
        layout = self._layout(handle)
        digest = self.modules.digest(name, layout, lambda: self._siblings(handle))
        self._remember_module(handle)
        return Kernel(
            name, digest, layout, self._function_attributes(handle), None, self.modules.mutable(digest)
        )

    def _layout(self, handle: Any) -> tuple[tuple[int, int], ...]:
        out: list[tuple[int, int]] = []
        while True:
            error, *span = self.d.cuFuncGetParamInfo(handle, len(out))
            if error.name == "CUDA_ERROR_INVALID_VALUE":
                return tuple(out)
            if int(error):
                raise DriverFailure("cuFuncGetParamInfo", error.name)
            out.append((int(span[0]), int(span[1])))

    def _function_attributes(self, handle: Any) -> tuple[tuple[int, int], ...]:
        pairs = ((n, self._function_attribute(handle, n)) for n in FUNCTION_ATTRIBUTES)
        return tuple((n, v) for n, v in pairs if v not in (0, -1))

    def _function_attribute(self, handle: Any, number: int) -> int:
        return int(call(self.d.cuFuncGetAttribute, self.d.CUfunction_attribute(number), handle))

    def _remember_module(self, handle: Any) -> None:
        module = call(self.d.cuFuncGetModule, handle)
        if int(module) not in self._seen_modules:
            self._seen_modules[int(module)] = self._functions(module)

    def _functions(self, module: Any) -> list[int]:
        count = call(self.d.cuModuleGetFunctionCount, module)
        return [int(f) for f in call(self.d.cuModuleEnumerateFunctions, count, module)]

    def _siblings(self, handle: Any) -> set[str]:
        functions = self._functions(call(self.d.cuFuncGetModule, handle))
        return {call(self.d.cuFuncGetName, self.d.CUfunction(f)).decode() for f in functions}

    def binary(self, digest: str) -> bytes:
        return self.modules.images[digest]

    def load_library(self, image: bytes) -> int:
        return int(call(self.d.cuLibraryLoadData, image, [], [], 0, [], [], 0))

    def library_kernel(self, library: int, name: str) -> int:
        found = call(self.d.cuLibraryGetKernel, self.d.CUlibrary(library), name.encode())
        return int(call(self.d.cuKernelGetFunction, found))

    def loaded_functions(self) -> list[int]:
        return [f for functions in self._seen_modules.values() for f in functions]

    def see_functions(self, graph: int) -> None:
        """Remember the modules of a (first-layer) graph's kernels: triggering, section 5.2."""
        for node in self.nodes(graph):
            if self.kind(node) == NodeKind.KERNEL:
                p = call(self.d.cuGraphKernelNodeGetParams, self.d.CUgraphNode(node))
                self.kernel(int(p.func) or int(call(self.d.cuKernelGetFunction, p.kern)))

    def exported(self, name: str, library: str | None) -> int | None:
        """A host stub found by dlsym, turned into a function by the runtime."""
        from coldstart.graphs.cuda.symbols import function_by_symbol

        return function_by_symbol(name, library)

    def set_function_attributes(self, function: int, attributes: Sequence[tuple[int, int]]) -> None:
        for number, value in attributes:
            call(
                self.d.cuFuncSetAttribute,
                self.d.CUfunction(function),
                self.d.CUfunction_attribute(number),
                value,
            )

    # --- building ------------------------------------------------------------------------------------
    def new_graph(self) -> int:
        return int(call(self.d.cuGraphCreate, 0))

    def add_kernels(self, graph: int, rows: Array) -> list[Any]:
        rows = np.ascontiguousarray(rows)
        handle, params, add = self.d.CUgraph(graph), self._params, self.d.cuGraphAddKernelNode
        target, source, width, move = params.getPtr(), rows.ctypes.data, LAUNCH.itemsize, ctypes.memmove
        out: list[Any] = []
        for at in range(source, source + len(rows) * width, width):
            move(target, at, width)
            error, node = add(handle, None, 0, params)
            if error:
                raise DriverFailure("cuGraphAddKernelNode", error.name)
            out.append(node)
        return out

    def add_memset(self, graph: int, row: Array) -> Any:
        p = self.d.CUDA_MEMSET_NODE_PARAMS()
        p.dst, p.pitch, p.value = self.d.CUdeviceptr(int(row["target"])), int(row["pitch"]), int(row["value"])
        p.elementSize, p.width, p.height = int(row["element"]), int(row["width"]), int(row["height"])
        return call(self.d.cuGraphAddMemsetNode, self.d.CUgraph(graph), None, 0, p, self.context)

    def add_memcpy(self, graph: int, row: Array) -> Any:
        p, device = self.d.CUDA_MEMCPY3D(), self.d.CUmemorytype(MEMORY_DEVICE)
        p.srcMemoryType = p.dstMemoryType = device
        p.srcDevice, p.dstDevice = (self.d.CUdeviceptr(int(row[n])) for n in ("source", "target"))
        p.WidthInBytes, p.Height, p.Depth = (int(row[n]) for n in ("width", "height", "depth"))
        p.srcPitch, p.srcHeight = int(row["source_pitch"]), int(row["source_height"])
        p.dstPitch, p.dstHeight = int(row["target_pitch"]), int(row["target_height"])
        return call(self.d.cuGraphAddMemcpyNode, self.d.CUgraph(graph), None, 0, p, self.context)

    def add_empty(self, graph: int) -> Any:
        return call(self.d.cuGraphAddEmptyNode, self.d.CUgraph(graph), None, 0)

    def set_attributes(self, node: Any, attributes: Attributes) -> None:
        for number, data in attributes:
            value = self.d.CUkernelNodeAttrValue()
            raw = bytes.fromhex(data).ljust(64, b"\0")
            ctypes.memmove(value.getPtr(), raw, 64)
            call(self.d.cuGraphKernelNodeSetAttribute, node, self.d.CUlaunchAttributeID(number), value)

    def add_edges(self, graph: int, nodes: Sequence[Any], edges: Array) -> None:
        special = (edges["type"] != 0) | (edges["from_port"] != 0) | (edges["to_port"] != 0)
        self._add_edges(graph, nodes, edges[~special], None)
        if special.any():
            rows = edges[special]
            self._add_edges(graph, nodes, rows, [self._edge_data(row) for row in rows])

    def _edge_data(self, row: Any) -> Any:
        data = self.d.CUgraphEdgeData()
        raw = bytes([row["from_port"], row["to_port"], row["type"]]).ljust(EDGE_BYTES, b"\0")
        ctypes.memmove(data.getPtr(), raw, EDGE_BYTES)
        return data

    def _add_edges(self, graph: int, nodes: Sequence[Any], rows: Array, data: list[Any] | None) -> None:
        if len(rows):
            sources = [nodes[i] for i in rows["source"].tolist()]
            targets = [nodes[i] for i in rows["target"].tolist()]
            call(self.d.cuGraphAddDependencies, self.d.CUgraph(graph), sources, targets, data, len(rows))

    def instantiate(self, graph: int) -> int:
        return int(call(self.d.cuGraphInstantiate, self.d.CUgraph(graph), 0))

    def launch(self, executable: int, stream: int) -> None:
        call(self.d.cuGraphLaunch, self.d.CUgraphExec(executable), self.d.CUstream(stream))

    def destroy(self, graph: int, executable: int) -> None:
        if executable:
            call(self.d.cuGraphExecDestroy, self.d.CUgraphExec(executable))
        if graph:
            call(self.d.cuGraphDestroy, self.d.CUgraph(graph))

    # --- memory --------------------------------------------------------------------------------------
    def allocate(self, size: int) -> int:
        return int(call(self.d.cuMemAlloc, size))

    def free(self, address: int) -> None:
        call(self.d.cuMemFree, self.d.CUdeviceptr(address))

    def address_range(self, address: int) -> Range | None:
        kind, base, size = call(self.d.cuPointerGetAttributes, 3, self._range, address)
        return Range(int(base), int(size), int(kind) == MEMORY_HOST) if int(kind) and int(size) else None

    def read(self, address: int, size: int) -> bytes:
        out = bytearray(size)
        if size:
            call(self.d.cuMemcpyDtoH, out, self.d.CUdeviceptr(address), size)
        return bytes(out)

    def write(self, address: int, data: bytes) -> None:
        call(self.d.cuMemcpyHtoD, self.d.CUdeviceptr(address), data, len(data))

    def fill(self, address: int, size: int, value: int) -> None:
        call(self.d.cuMemsetD8, self.d.CUdeviceptr(address), value, size)

    def synchronize(self) -> None:
        call(self.d.cuCtxSynchronize)

    def move_tensor_map(self, descriptor: bytes, address: int) -> bytes:
        tensor_map = self.d.CUtensorMap()
        ctypes.memmove(tensor_map.getPtr(), descriptor, len(descriptor))
        call(self.d.cuTensorMapReplaceAddress, tensor_map, address)
        return bytes_at(tensor_map.getPtr(), len(descriptor))


def _extra(address: int, size: int) -> bytes:
    """The packed parameter buffer of a CU_LAUNCH_PARAM list (1: buffer pointer, 2: size pointer, 0: end)."""
    words = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint64)) if address else None
    at = 0
    while words and words[at] and at < 8:
        if words[at] == 1:
            return bytes_at(words[at + 1], size)
        at += 2
    raise Refused("a kernel node without readable parameters")
