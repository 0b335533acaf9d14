"""Reading part of the cuda-bindings backend: nodes, parameters, attributes, functions, modules."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from coldstart.graphs.api import Edge, KernelNode, NodeKind, Range
from coldstart.graphs.cuda.calls import bindings, bytes_at, call, primary_context
from coldstart.graphs.cuda.modules import ModuleLog
from coldstart.graphs.errors import DriverError, GraphRefusedError
from coldstart.graphs.tables import MEMCPY, MEMSET, Attributes, Kernel

# Launch attributes that a captured node can carry: cooperative, cluster, scheduling, programmatic, priority,
# memory domain map and domain, preferred cluster, carve-out.
NODE_ATTRIBUTES = (2, 4, 5, 6, 8, 9, 10, 11, 14)
DEFAULTS = {9: b"\0\1", 14: b"\xff\xff\xff\xff"}
FUNCTION_ATTRIBUTES = (8, 9, 14)  # dynamic shared bytes, carve-out, non-portable cluster
ABSENT = ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_NOT_SUPPORTED")
MEMORY_HOST, MEMORY_DEVICE = 1, 2
EDGE_BYTES = 8


class CudaReader:
    """Reader of graphs; `modules` finds the binary of each function."""

    def __init__(self, modules: ModuleLog | None = None, ordinal: int = 0) -> None:
        self.d = bindings()
        self.modules = modules or ModuleLog()
        self.context = primary_context(ordinal)
        self._kernels: dict[int, Kernel] = {}
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
        """Return the edges, read into own buffers: bindings 13.0 return edge data whose memory is already freed."""
        count = ctypes.c_size_t()
        self._get_edges(graph, None, None, None, count)
        sources, targets = ((ctypes.c_uint64 * count.value)() for _ in range(2))
        data = (ctypes.c_uint8 * (EDGE_BYTES * count.value))()
        if count.value:
            self._get_edges(graph, sources, targets, data, count)
        ports = (data[i : i + 3] for i in range(0, len(data), EDGE_BYTES))
        return [Edge(s, t, *p) for s, t, p in zip(sources, targets, ports, strict=True)]

    @staticmethod
    def _get_edges(graph: int, sources: Any, targets: Any, data: Any, count: ctypes.c_size_t) -> None:
        get = ctypes.CDLL("libcuda.so.1").cuGraphGetEdges_v2
        result = get(ctypes.c_void_p(graph), sources, targets, data, ctypes.byref(count))
        if result:
            raise DriverError("cuGraphGetEdges", result)

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
        """Return the packed parameters, from kernelParams or from the packed buffer of `extra`."""
        out = bytearray(kernel.size)
        if not int(p.kernelParams):
            return _extra(int(p.extra), kernel.size)
        pointers = (ctypes.c_uint64 * len(kernel.layout)).from_address(int(p.kernelParams))
        for address, (offset, size) in zip(pointers, kernel.layout, strict=True):
            out[offset : offset + size] = bytes_at(address, size)
        return bytes(out)

    def _attributes(self, node: int) -> Attributes:
        handle, attributes = self.d.CUgraphNode(node), []
        if self._attribute(handle, 1)[8:16].strip(b"\0"):  # num_bytes of CUaccessPolicyWindow
            raise GraphRefusedError("a node has an access-policy window")
        for number in NODE_ATTRIBUTES:
            data = self._attribute(handle, number).rstrip(b"\0")
            if data and data != DEFAULTS.get(number):
                attributes.append((number, data.hex()))
        return tuple(attributes)

    def _attribute(self, node: Any, number: int) -> bytes:
        try:
            value = call(self.d.cuGraphKernelNodeGetAttribute, node, self.d.CUlaunchAttributeID(number))
        except DriverError as failure:
            if failure.result in ABSENT:  # this driver has no such attribute on nodes
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
            raise GraphRefusedError("a memory copy has an offset into its source or destination")
        address = int(getattr(p, f"{side}Device"))
        held = self.address_range(address) if kind in (MEMORY_DEVICE, 4) else None
        if held is None or held.host:
            raise GraphRefusedError("a memory copy reads or writes host memory or an array")
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
                raise DriverError("cuFuncGetParamInfo", error.name)
            out.append((int(span[0]), int(span[1])))

    def _function_attributes(self, handle: Any) -> tuple[tuple[int, int], ...]:
        pairs = ((n, self._function_attribute(handle, n)) for n in FUNCTION_ATTRIBUTES)
        return tuple((n, v) for n, v in pairs if v not in (0, -1))

    def _function_attribute(self, handle: Any, number: int) -> int:
        return int(call(self.d.cuFuncGetAttribute, self.d.CUfunction_attribute(number), handle))

    def _siblings(self, function: Any) -> set[str]:
        return {call(self.d.cuFuncGetName, f).decode() for f in self._functions_of_module(function)}

    def _functions_of_module(self, function: Any) -> list[Any]:
        """Return the functions of the same module, or none if the driver cannot list them: no graph may depend on it."""
        try:
            module = call(self.d.cuFuncGetModule, function)
            count = call(self.d.cuModuleGetFunctionCount, module)
            return list(call(self.d.cuModuleEnumerateFunctions, count, module))
        except DriverError:
            return []

    def binary(self, digest: str) -> bytes:
        return self.modules.images[digest]

    def load_library(self, image: bytes) -> int:
        return int(call(self.d.cuLibraryLoadData, image, [], [], 0, [], [], 0))

    def library_kernel(self, library: int, name: str) -> int:
        kernel = call(self.d.cuLibraryGetKernel, self.d.CUlibrary(library), name.encode())
        return int(call(self.d.cuKernelGetFunction, kernel))

    def loaded_functions(self) -> list[int]:
        known = [self.d.CUfunction(function) for function in self._kernels]
        return list({int(f): None for function in known for f in self._functions_of_module(function)})

    def see_functions(self, graph: int) -> None:
        """Record the modules of a (first-layer) graph's kernels: triggering, section 5.2."""
        for node in self.nodes(graph):
            if self.kind(node) == NodeKind.KERNEL:
                p = call(self.d.cuGraphKernelNodeGetParams, self.d.CUgraphNode(node))
                self.kernel(int(p.func) or int(call(self.d.cuKernelGetFunction, p.kern)))

    def set_function_attributes(self, function: int, attributes: Sequence[tuple[int, int]]) -> None:
        for number, value in attributes:
            call(
                self.d.cuFuncSetAttribute,
                self.d.CUfunction(function),
                self.d.CUfunction_attribute(number),
                value,
            )

    def address_range(self, address: int) -> Range | None:
        kind, base, size = call(self.d.cuPointerGetAttributes, 3, self._range, address)
        return Range(int(base), int(size), int(kind) == MEMORY_HOST) if int(kind) and int(size) else None


def _extra(address: int, size: int) -> bytes:
    """Return the packed parameter buffer of a CU_LAUNCH_PARAM list (1: buffer pointer, 2: size pointer, 0: end)."""
    words = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint64)) if address else None
    at = 0
    while words and words[at] and at < 8:
        if words[at] == 1:
            return bytes_at(words[at + 1], size)
        at += 2
    raise GraphRefusedError("a kernel node has no readable parameters")
