"""CUDA driver calls through cuda-bindings.

One kernel parameter struct is reused for all nodes: the 72 bytes of a node are copied into it from the launch table, so
each node costs one memmove and one driver call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from coldstart.graphs.api import LAUNCH, Edge, KernelNode
from coldstart.graphs.cuda.modules import ModuleLog
from coldstart.graphs.errors import DriverError, GraphRefusedError
from coldstart.graphs.tables import DEVICE, HOST, MEMCPY, MEMSET, Array, Attributes, Kernel, SymbolRegion

OLDEST = 13  # in earlier versions, functions with edge data have another signature
INSTANTIATE = 1 | 8  # auto free on launch, node priorities: the flags of PyTorch
MAP_ALIGNMENT = 64

# Launch attributes that a captured node can carry: cooperative, cluster, scheduling, programmatic, priority,
# memory domain map and domain, preferred cluster, carve-out.
NODE_ATTRIBUTES = (2, 4, 5, 6, 8, 9, 10, 11, 14)
DEFAULTS = {9: b"\0\1", 14: b"\xff\xff\xff\xff"}
FUNCTION_ATTRIBUTES = (8, 9, 14)  # dynamic shared bytes, carve-out, non-portable cluster
ABSENT = ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_NOT_SUPPORTED")
MEMORY_HOST, MEMORY_DEVICE = 1, 2
EDGE_BYTES = 8


@cache
def bindings() -> Any:
    """Import cuda.bindings.driver. Raises DriverError with the install command if it is missing or too old."""
    try:
        driver = import_module("cuda.bindings.driver")
        version = str(import_module("cuda.bindings").__version__)
    except ImportError as error:
        raise DriverError(f"cannot import cuda.bindings: {error}; run `coldstart install gpu`") from error
    if int(version.split(".")[0]) < OLDEST:
        raise DriverError(f"cuda.bindings {version} is too old; run `coldstart install gpu`")
    return driver


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a driver function, and return its results without the error code. Raises DriverError if the call fails."""
    try:
        error, *values = function(*arguments)
    except RuntimeError as missing:  # cuda-bindings found no driver library or no entry point
        raise DriverError(f"cannot call {function.__name__}: {missing}") from missing
    if int(error) != 0:
        raise DriverError(f"{function.__name__} failed: {error.name}", error.name)
    return values[0] if len(values) == 1 else tuple(values)


def primary_context(ordinal: int = 0) -> Any:
    """Retain the primary context of a device, make it current in this thread, and return it."""
    d = bindings()
    call(d.cuInit, 0)
    context = call(d.cuDevicePrimaryCtxRetain, call(d.cuDeviceGet, ordinal))
    call(d.cuCtxSetCurrent, context)
    return context


class CudaDriver:
    """Driver that reads, builds and launches graphs in the primary context of the first visible GPU.

    `modules` finds the kernel binary of each function.
    """

    def __init__(self, modules: ModuleLog | None = None) -> None:
        self.d = bindings()
        self.modules = modules or ModuleLog()
        self.context = primary_context()
        self._kernels: dict[int, Kernel] = {}
        self._range = [self.d.CUpointer_attribute(i) for i in (2, 11, 12)]
        self._params = self.d.CUDA_KERNEL_NODE_PARAMS()

    # --- reading -------------------------------------------------------------------------------------
    def nodes(self, graph: int) -> list[int]:
        handle = self.d.CUgraph(graph)
        count = call(self.d.cuGraphGetNodes, handle)[1]
        return [int(n) for n in call(self.d.cuGraphGetNodes, handle, count)[0]]

    def edges(self, graph: int) -> list[Edge]:
        """Return the edges. They are read into separate buffers, because cuda-bindings 13.0 returns freed edge data."""
        count = ctypes.c_size_t()
        self._get_edges(graph, None, None, None, count)
        sources, targets = ((ctypes.c_uint64 * count.value)() for _ in range(2))
        data = (ctypes.c_uint8 * (EDGE_BYTES * count.value))()
        if count.value:
            self._get_edges(graph, sources, targets, data, count)
        ports = (data[i : i + 3] for i in range(0, len(data), EDGE_BYTES))
        return [(s, t, *p) for s, t, p in zip(sources, targets, ports, strict=True)]

    @staticmethod
    def _get_edges(graph: int, sources: Any, targets: Any, data: Any, count: ctypes.c_size_t) -> None:
        get = ctypes.CDLL("libcuda.so.1").cuGraphGetEdges_v2
        result = get(ctypes.c_void_p(graph), sources, targets, data, ctypes.byref(count))
        if result:
            raise DriverError(f"cuGraphGetEdges failed: CUDA error {result}")

    def kind(self, node: int) -> Any:
        return call(self.d.cuGraphNodeGetType, self.d.CUgraphNode(node))

    def kernel_node(self, node: int) -> KernelNode:
        p = call(self.d.cuGraphKernelNodeGetParams, self.d.CUgraphNode(node))
        function = int(p.func) or int(call(self.d.cuKernelGetFunction, p.kern))
        grid = (int(p.gridDimX), int(p.gridDimY), int(p.gridDimZ))
        block = (int(p.blockDimX), int(p.blockDimY), int(p.blockDimZ))
        payload = self._payload(p, self.kernel(function))
        return KernelNode(function, grid, block, int(p.sharedMemBytes), payload, self._attributes(node))

    @staticmethod
    def _payload(p: Any, kernel: Kernel) -> bytes:
        out = bytearray(kernel.size)
        if kernel.layout and not int(p.kernelParams):  # the launch passed packed parameters (`extra`)
            raise GraphRefusedError(f"cannot read the parameters of kernel {kernel.name}")
        pointers = (ctypes.c_uint64 * len(kernel.layout)).from_address(int(p.kernelParams))
        for address, (offset, size) in zip(pointers, kernel.layout, strict=True):
            out[offset : offset + size] = ctypes.string_at(address, size)
        return bytes(out)

    def _attributes(self, node: int) -> Attributes:
        handle, attributes = self.d.CUgraphNode(node), []
        if self._attribute(handle, 1)[8:16].strip(b"\0"):  # num_bytes of CUaccessPolicyWindow
            raise GraphRefusedError("a kernel node has an access policy window, which cannot be restored")
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
        return ctypes.string_at(value.getPtr(), 64)

    def memset_node(self, node: int) -> bytes:
        p = call(self.d.cuGraphMemsetNodeGetParams, self.d.CUgraphNode(node))
        return np.array([tuple(int(getattr(p, name)) for name in MEMSET.names or ())], MEMSET).tobytes()

    def memcpy_node(self, node: int) -> bytes:
        p = call(self.d.cuGraphMemcpyNodeGetParams, self.d.CUgraphNode(node))
        for side in ("src", "dst"):
            if any(int(getattr(p, side + part)) for part in ("XInBytes", "Y", "Z", "LOD")):
                raise GraphRefusedError("a memcpy node has an offset, which cannot be restored")
            on_device = int(getattr(p, f"{side}MemoryType")) in (MEMORY_DEVICE, 4)
            held = self.address_range(int(getattr(p, f"{side}Device"))) if on_device else None
            if held is None or held.symbol == HOST:
                raise GraphRefusedError("a memcpy node of host memory or an array cannot be restored")
        return np.array([tuple(int(getattr(p, name)) for name in MEMCPY.names or ())], MEMCPY).tobytes()

    # --- functions -----------------------------------------------------------------------------------
    def kernel(self, function: int) -> Kernel:
        if function not in self._kernels:
            self._kernels[function] = self._describe(function)
        return self._kernels[function]

    def _describe(self, function: int) -> Kernel:
        handle = self.d.CUfunction(function)
        name = call(self.d.cuFuncGetName, handle).decode()
        layout = self._layout(handle)
        module = self._module(handle)
        digest = self.modules.digest(int(module or 0), name, layout, lambda: self._list_names(module))
        mutable = digest is not None and bool(self.modules.cubins[digest].mutable_globals)
        return Kernel(name, digest, layout, self._function_attributes(handle), mutable)

    def _layout(self, handle: Any) -> tuple[tuple[int, int], ...]:
        out: list[tuple[int, int]] = []
        while True:
            error, *span = self.d.cuFuncGetParamInfo(handle, len(out))
            if error.name == "CUDA_ERROR_INVALID_VALUE":
                return tuple(out)
            if int(error):
                raise DriverError(f"cuFuncGetParamInfo failed: {error.name}")
            out.append((int(span[0]), int(span[1])))

    def _function_attributes(self, handle: Any) -> tuple[tuple[int, int], ...]:
        get, kind = self.d.cuFuncGetAttribute, self.d.CUfunction_attribute
        pairs = ((number, int(call(get, kind(number), handle))) for number in FUNCTION_ATTRIBUTES)
        return tuple((number, value) for number, value in pairs if value not in (0, -1))

    def _module(self, function: Any) -> Any:
        """Return the module of a function, or None if the driver does not report it."""
        try:
            return call(self.d.cuFuncGetModule, function)
        except DriverError:
            return None

    def _list_names(self, module: Any) -> set[str]:
        """Return the names of a module's functions, or an empty set if the driver cannot list them."""
        try:
            count = call(self.d.cuModuleGetFunctionCount, module)
            functions = list(call(self.d.cuModuleEnumerateFunctions, count, module))
        except (DriverError, TypeError):
            return set()
        return {call(self.d.cuFuncGetName, function).decode() for function in functions}

    def binary(self, digest: str) -> bytes:
        return self.modules.images[digest]

    def load_library(self, image: bytes) -> int:
        return int(call(self.d.cuLibraryLoadData, image, [], [], 0, [], [], 0))

    def library_kernel(self, library: int, name: str) -> int:
        kernel = call(self.d.cuLibraryGetKernel, self.d.CUlibrary(library), name.encode())
        return int(call(self.d.cuKernelGetFunction, kernel))

    def set_function_attributes(self, function: int, attributes: Sequence[tuple[int, int]]) -> None:
        handle = self.d.CUfunction(function)
        for number, value in attributes:
            call(self.d.cuFuncSetAttribute, handle, self.d.CUfunction_attribute(number), value)

    def address_range(self, address: int) -> SymbolRegion | None:
        kind, base, size = call(self.d.cuPointerGetAttributes, 3, self._range, address)
        symbol = HOST if int(kind) == MEMORY_HOST else DEVICE
        return SymbolRegion(symbol, int(size), int(base)) if int(kind) and int(size) else None

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
                raise DriverError(f"cuGraphAddKernelNode failed: {error.name}")
            out.append(node)
        return out

    def add_memset(self, graph: int, row: Any) -> Any:
        p = self.d.CUDA_MEMSET_NODE_PARAMS()
        for name, value in zip(MEMSET.names or (), row.item(), strict=True):
            setattr(p, name, value)
        return call(self.d.cuGraphAddMemsetNode, self.d.CUgraph(graph), None, 0, p, self.context)

    def add_memcpy(self, graph: int, row: Any) -> Any:
        p, device = self.d.CUDA_MEMCPY3D(), self.d.CUmemorytype(MEMORY_DEVICE)
        p.srcMemoryType = p.dstMemoryType = device
        for name, value in zip(MEMCPY.names or (), row.item(), strict=True):
            setattr(p, name, value)
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
        """Add the edges, with one call for each distinct value of the edge data.

        Drivers 580 to 610 apply the data of the first edge in a call to all edges in that call.
        """
        words = (
            edges["from_port"]
            | edges["to_port"].astype(np.uint32) << 8
            | edges["type"].astype(np.uint32) << 16
        )
        for word in np.unique(words).tolist():
            rows, data = edges[words == word], None
            if word:  # from port, to port and type, one byte each
                record = self.d.CUgraphEdgeData()
                ctypes.memmove(record.getPtr(), word.to_bytes(EDGE_BYTES, "little"), EDGE_BYTES)
                data = [record] * len(rows)
            ends = ([nodes[i] for i in rows[name].tolist()] for name in ("source", "target"))
            call(self.d.cuGraphAddDependencies, self.d.CUgraph(graph), *ends, data, len(rows))

    def instantiate(self, graph: int) -> int:
        return int(call(self.d.cuGraphInstantiate, self.d.CUgraph(graph), INSTANTIATE))

    def launch(self, executable: int, stream: int) -> None:
        call(self.d.cuGraphLaunch, self.d.CUgraphExec(executable), self.d.CUstream(stream))

    def destroy(self, graph: int) -> None:
        call(self.d.cuGraphDestroy, self.d.CUgraph(graph))

    # --- memory --------------------------------------------------------------------------------------
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
        # Use a separate buffer, because the driver requires 64-byte alignment, which the bindings' object lacks.
        held = ctypes.create_string_buffer(len(descriptor) + MAP_ALIGNMENT)
        at = -(-ctypes.addressof(held) // MAP_ALIGNMENT) * MAP_ALIGNMENT
        ctypes.memmove(at, descriptor, len(descriptor))
        call(self.d.cuTensorMapReplaceAddress, self.d.CUtensorMap(_ptr=at), address)
        moved = ctypes.string_at(at, len(descriptor))
        del held  # the buffer lives until here
        return moved
