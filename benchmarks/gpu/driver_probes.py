"""Probes of phase P0: each runs separately and returns a value or an error text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coldstart.graphs import capture, references
from coldstart.graphs.api import LAUNCH
from coldstart.graphs.cuda.calls import call
from coldstart.graphs.elf import read_cubin
from coldstart.graphs.fatbin import library_entries, unpack
from coldstart.graphs.tables import EDGE
from coldstart.graphs.torch_framework import define_kept_class


def attempt(work: Callable[[], Any]) -> Any:
    """Return the result of `work` or the text of its exception."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - a probe reports whatever happens
        return f"{type(error).__name__}: {error}"


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


def tensor_map(driver: Any) -> dict[str, Any]:
    """Check that the address of an encoded map is decoded and survives being moved and moved back."""
    d, x = driver.d, torch.zeros((64, 64), dtype=torch.float16, device="cuda")
    tile = [d.cuuint64_t(64)] * 2, [d.cuuint64_t(128)], [d.cuuint32_t(64)] * 2, [d.cuuint32_t(1)] * 2
    kinds = (
        d.CUtensorMapInterleave(0), d.CUtensorMapSwizzle(0), d.CUtensorMapL2promotion(0),
        d.CUtensorMapFloatOOBfill(0),
    )  # fmt: skip
    half = d.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
    made = call(d.cuTensorMapEncodeTiled, half, 2, x.data_ptr(), *tile, *kinds)
    descriptor = b"".join(int(word).to_bytes(8, "little") for word in made.opaque)
    masks = capture.bit_masks(driver, descriptor)
    moved = driver.move_tensor_map(descriptor, x.data_ptr() + 4096)
    return {
        "address_found": capture.decode_map(driver, descriptor, masks) == x.data_ptr(),
        "bytes_that_move": [i for i in range(128) if moved[i] != descriptor[i]],
        "there_and_back": driver.move_tensor_map(moved, x.data_ptr()) == descriptor,
        "plain_address_at_0": int.from_bytes(descriptor[:8], "little") == x.data_ptr(),
    }


def library_cubin(driver: Any) -> dict[str, Any]:
    """Load a cubin of libtorch_cuda for this device and find a kernel by its name."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    wanted = 10 * torch.cuda.get_device_capability()[0]
    with path.open("rb") as file:
        data = file.read()
    entry = next(e for e in library_entries(data) if e.architecture == wanted)
    image = unpack(data[entry.offset : entry.offset + entry.size])
    name = next(iter(read_cubin(image).kernels))
    return {"kernel": name, "function": bool(driver.library_kernel(driver.load_library(image), name))}


def images_in_libraries(images: dict[str, bytes]) -> dict[str, int]:
    """Count the binaries reported by CUPTI that a loaded library contains byte for byte."""
    found = references.refer(images, references.loaded_libraries())
    return {"seen": len(images), "in_a_library": len(found)}
