"""The ELF reader on output of ptxas: each binary is classified as its source in tests/cubins states."""

from __future__ import annotations

import pytest
from cubins import assembler, cubin

from coldstart.graphs.api import KernelNode
from coldstart.graphs.elf import read_cubin
from coldstart.graphs.record import GraphBuilder
from coldstart.graphs.tables import Kernel, maps

pytestmark = pytest.mark.skipif(assembler() is None, reason="no ptxas: Triton is not installed here")
AMPERE, HOPPER = ("sm_80", "sm_90a"), ("sm_90a",)
TILES_SIZE, TILES_MAPS = 640, (128, 384)


@pytest.mark.parametrize("architecture", AMPERE)
def test_functions_texts_and_tables_are_not_state(architecture: str) -> None:
    assert read_cubin(cubin("objects", architecture)).mutable_globals == ()


@pytest.mark.parametrize("architecture", AMPERE)
def test_variables_that_persist_between_launches_are_state(architecture: str) -> None:
    assert read_cubin(cubin("state", architecture)).mutable_globals == ("history", "tickets")


@pytest.mark.parametrize("architecture", AMPERE)
def test_names_and_layouts_equal_the_source(architecture: str) -> None:
    assert read_cubin(cubin("objects", architecture)).kernels == dict.fromkeys(
        ("uses_objects", "uses_text", "uses_tables"), ((0, 8), (8, 4))
    )


@pytest.mark.parametrize("architecture", HOPPER)
def test_hopper_parameters(architecture: str) -> None:
    """Offsets count from the start of the bank, which is not 128-byte aligned; parameters may exceed 16 KiB since CUDA 12.1."""
    found = read_cubin(cubin("hopper", architecture))
    (at, size), (after, tail) = found.kernels.pop("reads_tiles")
    assert (size, tail) == (TILES_SIZE, 128) and after == at + size
    assert found.kernels == {
        "in_clusters": ((0, 8),), "in_a_grid": ((0, 8),), "takes_much": ((0, 20000), (20000, 8)),
    }  # fmt: skip
    assert found.mutable_globals == ()


def test_tensor_map_candidates_match_the_compiler_layout() -> None:
    """A map may be in a struct parameter whose offset in the packed buffer is only a multiple of 16."""
    layout = read_cubin(cubin("hopper", "sm_90a")).kernels["reads_tiles"]
    builder = GraphBuilder()
    kernel = Kernel("reads_tiles", None, layout)
    builder.add_kernel(KernelNode(1, (1, 1, 1), (1, 1, 1), 0, bytes(kernel.size)), kernel)
    builder.finish("one", 1, [1], [])
    found = maps(builder.graphs["one"], [kernel]).tolist()
    assert {layout[0][0] + at for at in TILES_MAPS} | {layout[1][0]} <= set(found)
    assert all(any(o <= at and at + 128 <= o + size for o, size in layout) for at in found)
