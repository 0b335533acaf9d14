"""DriverApi over cuda-bindings.

One kernel-parameter struct is reused: each node's 72 bytes are copied into it from the launch table, so a
node costs one memmove and one driver call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from coldstart.graphs.api import LAUNCH
from coldstart.graphs.cuda.calls import aligned, bytes_at, call
from coldstart.graphs.cuda.modules import ModuleLog
from coldstart.graphs.cuda.reader import EDGE_BYTES, MEMORY_DEVICE, CudaReader
from coldstart.graphs.errors import DriverError
from coldstart.graphs.tables import Array, Attributes

INSTANTIATE = 1 | 8  # auto free on launch, node priorities: the flags of PyTorch
MAP_ALIGNMENT = 64


class CudaDriver(CudaReader):
    """Driver that builds and launches graphs; the base class reads them."""

    def __init__(self, modules: ModuleLog | None = None, ordinal: int = 0) -> None:
        super().__init__(modules, ordinal)
        self._params = self.d.CUDA_KERNEL_NODE_PARAMS()

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
                raise DriverError("cuGraphAddKernelNode", error.name)
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
        """Add edges, with one call for each distinct edge data.

        Drivers 580 to 610 use the data of a call's first edge for all its edges.
        """
        words = (
            edges["from_port"]
            | edges["to_port"].astype(np.uint32) << 8
            | edges["type"].astype(np.uint32) << 16
        )
        for word in np.unique(words).tolist():
            self._add_edges(graph, nodes, edges[words == word], self._edge_data(word))

    def _edge_data(self, word: int) -> Any:
        """Return edge data of from port, to port and type, one byte each; None for the default."""
        if not word:
            return None
        data = self.d.CUgraphEdgeData()
        raw = word.to_bytes(EDGE_BYTES, "little")
        ctypes.memmove(data.getPtr(), raw, EDGE_BYTES)
        return data

    def _add_edges(self, graph: int, nodes: Sequence[Any], rows: Array, record: Any) -> None:
        sources = [nodes[i] for i in rows["source"].tolist()]
        targets = [nodes[i] for i in rows["target"].tolist()]
        data = None if record is None else [record] * len(rows)
        call(self.d.cuGraphAddDependencies, self.d.CUgraph(graph), sources, targets, data, len(rows))

    def instantiate(self, graph: int) -> int:
        return int(call(self.d.cuGraphInstantiate, self.d.CUgraph(graph), INSTANTIATE))

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
        # Use an own buffer: the driver requires 64-byte alignment, which the bindings' object lacks.
        held, at = aligned(len(descriptor), MAP_ALIGNMENT)
        ctypes.memmove(at, descriptor, len(descriptor))
        call(self.d.cuTensorMapReplaceAddress, self.d.CUtensorMap(_ptr=at), address)
        moved = bytes_at(at, len(descriptor))
        del held  # the buffer lives until here
        return moved
