"""The ELF reader on output of ptxas: each binary is classified as its source in tests/cubins states."""

from __future__ import annotations

import pytest
from cubins import assembler, cubin

from coldstart.graphs.api import KernelNode
from coldstart.graphs.elf import read_cubin
from coldstart.graphs.record import GraphBuilder
from coldstart.graphs.tables import Kernel, find_tensor_map_offsets

pytestmark = pytest.mark.skipif(assembler() is None, reason="no ptxas: Triton is not installed here")
TILES_SIZE, TILES_MAPS = 640, (128, 384)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_names_layouts_and_state_equal_the_source(architecture: str) -> None:
    """Functions, texts and tables are no state; variables that persist between launches are."""
    found = read_cubin(cubin("objects", architecture))
    kernels = ("uses_objects", "uses_text", "uses_tables")
    assert found.mutable_globals == () and found.kernels == dict.fromkeys(kernels, ((0, 8), (8, 4)))
    assert read_cubin(cubin("state", architecture)).mutable_globals == ("history", "tickets")


def test_hopper_parameters() -> None:
    """Offsets count from the start of the bank, which is not 128-byte aligned; parameters may exceed 16 KiB since CUDA 12.1."""
    found = read_cubin(cubin("hopper", "sm_90a"))
    (at, size), (after, tail) = layout = found.kernels.pop("reads_tiles")
    assert (size, tail) == (TILES_SIZE, 128) and after == at + size and found.mutable_globals == ()
    assert found.kernels == {
        "in_clusters": ((0, 8),), "in_a_grid": ((0, 8),), "takes_much": ((0, 20000), (20000, 8)),
    }  # fmt: skip
    # A tensor map may be in a struct parameter whose offset in the packed buffer is only a multiple of 16.
    builder, kernel = GraphBuilder(), Kernel("reads_tiles", None, layout)
    builder.add_kernel(KernelNode(1, (1, 1, 1), (1, 1, 1), 0, bytes(kernel.size)), kernel)
    builder.finish("one", 1, [1], [])
    candidates = find_tensor_map_offsets(builder.graphs["one"], [kernel]).tolist()
    assert {at + place for place in TILES_MAPS} | {after} <= set(candidates)
    assert all(any(o <= at and at + 128 <= o + size for o, size in layout) for at in candidates)
