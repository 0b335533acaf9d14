"""Words that look like pointers or constants and are not."""

from __future__ import annotations

import pytest

from coldstart.graphs.api import AllocationEvent
from coldstart.graphs.errors import GraphRefusedError
from coldstart.graphs.link import combine
from coldstart.graphs.record import Snapshot
from coldstart.graphs.tables import Kernel
from tests.support.graphs.random_graphs import KEY, Field, Program, judge, place, snapshot, third

SIZES = [4096, 8192, 12288]
SYMBOLS = ["param:w", "kv:0", "hidden"]


def _program(*fields: Field, size: int, layout: tuple[tuple[int, int], ...] | None = None) -> Program:
    program = Program(list(SYMBOLS), list(SIZES))
    program.kernels = [Kernel("k", "known", layout or ((0, size),))]
    program.nodes = [(0, list(fields))]
    return program


def _pool_program(count: int) -> Program:
    program = _program(*(Field("pointer", 8 * i, 8, 3 + i, 8 * i) for i in range(count)), size=8 * count)
    for number in range(count):
        program.frees[len(program.symbols)] = None if number % 3 else 1
        program.symbols.append("pool")
        program.sizes.append((512, 20 << 20, 700, 12 << 20)[number % 4])
    return program


def test_every_graph_is_recorded_when_the_second_process_has_one_more_segment() -> None:
    """A model of 7B was refused on an H100: one pair of segments more renamed all the others."""
    program = _pool_program(12)
    a, b = (place(program, seed, segment=size) for seed, size in ((1, 64 << 20), (2, 20 << 20)))
    assert len(b.segments) > len(a.segments)
    tables = combine(snapshot(program, a), snapshot(program, b))
    assert tables.refused == {} and len(tables.graphs[KEY].relocations) == 12
    assert judge(program, tables, third(program, tables, b, 3)) == (0, 0)


def test_a_framework_segment_is_never_adopted_as_library_memory() -> None:
    """The word points into the unused rest of a segment of the framework."""
    program, shots = _program(Field("pointer", 0, 8, 2, 4096), size=8), list[Snapshot]()
    for seed in (1, 2):
        placed = place(program, seed)
        placed.trace.insert(0, AllocationEvent("alloc", placed.bases[2], 512))
        shots.append(snapshot(program, placed))
    assert list(combine(*shots).refused) == [KEY]


@pytest.mark.parametrize(("at", "symbol"), [(0, "alloc"), (8, "alloc"), (3, "alloc"), (0, "kv:0")])
def test_words_to_memory_that_did_not_move_are_refused(at: int, symbol: str) -> None:
    """Named memory and a traced allocation: one past its end, and in a packed struct as well."""
    filler = [Field("constant", 0, at, value=b"\x01" * at)] if at else []
    program = _program(*filler, Field("pointer", at, 8, 1, SIZES[1]), size=at + 8)
    program.symbols[1] = symbol
    shots = []
    for seed in (1, 2):
        placed = place(program, seed)
        placed.bases[1] = 0x7F9000000000
        placed.trace[:] = [AllocationEvent("alloc", placed.bases[1], SIZES[1])] * (symbol == "alloc")
        shots.append(snapshot(program, placed))
    with pytest.raises(GraphRefusedError, match=r"alloc:8192\.0|kv:0"):
        combine(*shots)
