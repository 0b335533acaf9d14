"""Probes of phase P0."""

from __future__ import annotations

import ctypes
import mmap
import platform
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.answers import attempt, tell
from coldstart.graphs import capture, references
from coldstart.graphs.api import LAUNCH
from coldstart.graphs.cuda.backend import MAP_ALIGNMENT
from coldstart.graphs.cuda.calls import aligned, bindings, bytes_at, call
from coldstart.graphs.elf import read_cubin
from coldstart.graphs.errors import DriverError
from coldstart.graphs.fatbin import library_entries, unpack
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


def library_cubin(driver: Any) -> dict[str, Any]:
    """Load a cubin of libtorch_cuda for this device and find a kernel by its name."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    wanted = 10 * torch.cuda.get_device_capability()[0]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        entry = next(e for e in library_entries(data) if e.architecture == wanted)
        image = unpack(data[entry.offset : entry.offset + entry.size])
    name = next(iter(read_cubin(image).kernels))
    return {"kernel": name, "function": bool(driver.library_kernel(driver.load_library(image), name))}


def images_in_libraries(images: dict[str, bytes]) -> dict[str, int]:
    """Count the binaries reported by CUPTI that a loaded library contains byte for byte."""
    here = 10 * torch.cuda.get_device_capability()[0]
    found = references.refer(images, references.loaded_libraries(), here)
    return {"seen": len(images), "in_a_library": len(found)}
