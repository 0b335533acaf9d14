"""The cubin reader on hand-written files."""

from __future__ import annotations

import struct

import pytest

from coldstart.graphs.elf import parameters, read_cubin
from coldstart.graphs.errors import AlteredTableError
from tests.support.graphs.images import cubin

LAYOUT = ((0, 8), (8, 4), (16, 128), (144, 1))


def test_names_and_exact_parameter_layout() -> None:
    parsed = read_cubin(cubin({"_Z4gemmPf": ("gemm", LAYOUT), "twin": ("scale", ((0, 8),))}))
    assert parsed.kernels == {"_Z4gemmPf": LAYOUT, "twin": ((0, 8),)}
    assert parsed.mutable_globals == ()


def test_parameters_are_ordered_by_ordinal_not_by_place() -> None:
    first, second = (struct.pack("<BBHIHHI", 4, 0x17, 12, 0, i, 8 * i, 8 << 18) for i in (0, 1))
    assert parameters(second + first) == ((0, 8), (8, 8))


@pytest.mark.parametrize("cut", [0, 4, 63, 64, 200, -1])
def test_a_cut_file_is_refused(cut: int) -> None:
    with pytest.raises(AlteredTableError):
        read_cubin(cubin({"k": ("scale", LAYOUT)})[:cut])
