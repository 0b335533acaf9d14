"""The ELF reader on what ptxas makes: each binary is judged as its source, in tests/cubins, says."""

from __future__ import annotations

import pytest
from cubins import assembler, cubin

from coldstart.graphs import windows
from coldstart.graphs.api import KernelNode
from coldstart.graphs.builder import Builder
from coldstart.graphs.elf import read_cubin
from coldstart.graphs.tables import Kernel

pytestmark = pytest.mark.skipif(assembler() is None, reason="no ptxas: Triton is not installed here")
AMPERE, HOPPER = ("sm_80", "sm_90a"), ("sm_90a",)
TILES_SIZE, TILES_MAPS = 640, (128, 384)


@pytest.mark.parametrize("architecture", AMPERE)
def test_function_objects_texts_and_tables_are_no_state(architecture: str) -> None:
    assert read_cubin(cubin("objects", architecture)).mutable_globals == ()


@pytest.mark.parametrize("architecture", AMPERE)
def test_variables_that_a_launch_leaves_to_the_next_are(architecture: str) -> None:
    assert read_cubin(cubin("state", architecture)).mutable_globals == ("history", "tickets")


@pytest.mark.parametrize("architecture", AMPERE)
def test_names_and_layouts_are_the_sources(architecture: str) -> None:
    assert read_cubin(cubin("objects", architecture)).kernels == dict.fromkeys(
        ("uses_objects", "uses_text", "uses_tables"), ((0, 8), (8, 4))
    )


@pytest.mark.parametrize("architecture", HOPPER)
def test_hopper_parameters(architecture: str) -> None:
    """Offsets are from the bank's start, which is no multiple of 128; a parameter may pass 16 KiB since CUDA 12.1."""
    found = read_cubin(cubin("hopper", architecture))
    (at, size), (after, tail) = found.kernels.pop("reads_tiles")
    assert (size, tail) == (TILES_SIZE, 128) and after == at + size
    assert found.kernels == {
        "in_clusters": ((0, 8),), "in_a_grid": ((0, 8),), "takes_much": ((0, 20000), (20000, 8)),
    }  # fmt: skip
    assert found.mutable_globals == ()


def test_maps_are_looked_for_where_the_compiler_puts_them() -> None:
    """In a struct at an offset of the parameter, whose own offset in the packed buffer is a multiple of 16 only."""
    layout = read_cubin(cubin("hopper", "sm_90a")).kernels["reads_tiles"]
    builder = Builder()
    builder.begin("one", 1)
    kernel = Kernel("reads_tiles", None, layout)
    builder.kernel(KernelNode(1, (1, 1, 1), (1, 1, 1), 0, bytes(kernel.size)), kernel)
    builder.finish([1], [])
    found = windows.maps(builder.tables()).tolist()
    assert {layout[0][0] + at for at in TILES_MAPS} | {layout[1][0]} <= set(found)
    assert all(any(o <= at and at + 128 <= o + size for o, size in layout) for at in found)
