"""Probes of phase P0."""

from __future__ import annotations

import ctypes
import platform
from importlib import import_module
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.answers import attempt, tell
from coldstart.graphs import capture
from coldstart.graphs.api import LAUNCH
from coldstart.graphs.cuda.backend import MAP_ALIGNMENT
from coldstart.graphs.cuda.calls import aligned, bindings, bytes_at, call
from coldstart.graphs.errors import DriverError
from coldstart.graphs.tables import EDGE, TENSOR_MAP_BYTES
from coldstart.graphs.torch_framework import define_kept_class

HALF = 6  # CU_TENSOR_MAP_DATA_TYPE_FLOAT16


def versions() -> dict[str, Any]:
    """Facts that need no device."""
    return {
        "torch": torch.__version__, "cuda": torch.version.cuda, "driver": attempt(_driver_version),
        "cuda_bindings": import_module("cuda.bindings").__version__, "numpy": np.__version__,
        "python": platform.python_version(),
    }  # fmt: skip


def _driver_version() -> int:
    return int(call(bindings().cuDriverGetVersion))


def machine() -> dict[str, Any]:
    """Facts about the device."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
    }  # fmt: skip


def capture_retained_graph() -> int:
    """Return 1 if the graph class of a recording vLLM retains the raw CUDA graph."""
    graph, x = define_kept_class(torch.cuda.CUDAGraph)(), torch.ones(8, device="cuda")
    with torch.cuda.graph(graph):
        x.mul_(2)
    return int(bool(graph.raw_cuda_graph()))


def programmatic_edges(driver: Any, kernels: list[Any]) -> list[list[int]]:
    """Return the edge records of a rebuilt graph with a plain and a programmatic edge."""
    graph, rows = driver.new_graph(), np.zeros(3, LAUNCH)
    held = [np.frombuffer(kernels[0].payload.ljust(8, b"\0"), np.uint8).copy() for _ in rows]
    layout = driver.kernel(kernels[0].function).layout
    pointers = [np.array([h.ctypes.data + at for at, _ in layout] + [0], np.uint64) for h in held]
    for row, pointer in zip(rows, pointers, strict=True):
        row["function"], row["params"] = kernels[0].function, pointer.ctypes.data
        row["grid"], row["block"], row["shared"] = kernels[0].grid, kernels[0].block, kernels[0].shared
    nodes = driver.add_kernels(graph, rows)
    driver.add_edges(graph, nodes, np.array([(0, 1, 0, 0, 0, 0), (1, 2, 1, 0, 1, 0)], EDGE))
    return sorted([e.from_port, e.to_port, e.type] for e in driver.edges(graph))


def encode_map(address: int) -> bytes:
    """Encode a map of 64 x 64 halves into aligned memory: the object of the bindings is not aligned."""
    held, at = aligned(TENSOR_MAP_BYTES, MAP_ALIGNMENT)
    sizes, strides = (ctypes.c_uint64 * 2)(64, 64), (ctypes.c_uint64 * 1)(128)
    box, step = (ctypes.c_uint32 * 2)(64, 64), (ctypes.c_uint32 * 2)(1, 1)
    encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    result = encode(
        ctypes.c_void_p(at), HALF, 2, ctypes.c_void_p(address), sizes, strides, box, step, 0, 0, 0, 0
    )
    if result:
        raise DriverError("cuTensorMapEncodeTiled", result)
    del held
    return bytes_at(at, TENSOR_MAP_BYTES)


def tensor_map(driver: Any, address: int) -> dict[str, Any]:
    """Check that the address of an encoded map is decoded and survives being moved and moved back."""
    descriptor = encode_map(address)
    tell("tensor_map", descriptor.hex())
    masks = capture.bit_masks(driver, descriptor)
    moved = driver.move_tensor_map(descriptor, address + 4096)
    return {
        "address_found": capture.decode_map(driver, descriptor, masks) == address,
        "bytes_that_move": [i for i in range(TENSOR_MAP_BYTES) if moved[i] != descriptor[i]],
        "there_and_back": driver.move_tensor_map(moved, address) == descriptor,
        "plain_address_at_0": int.from_bytes(descriptor[:8], "little") == address,
    }
