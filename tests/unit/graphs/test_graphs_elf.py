"""The cubin reader on hand-written files."""

from __future__ import annotations

import pytest

from coldstart.graphs.elf import read_cubin
from coldstart.graphs.errors import AlteredTableError
from tests.support.graphs.images import cubin

LAYOUT = ((0, 8), (8, 4), (16, 128), (144, 1))


@pytest.mark.parametrize("cut", [0, 4, 63, 64, 200, -1])
def test_a_cut_file_is_refused(cut: int) -> None:
    with pytest.raises(AlteredTableError):
        read_cubin(cubin({"k": ("scale", LAYOUT)})[:cut])
