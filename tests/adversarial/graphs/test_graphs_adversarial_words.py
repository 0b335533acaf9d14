"""Words that look like pointers or constants and are not."""

from __future__ import annotations

import pytest

from coldstart.graphs.api import AllocationEvent
from coldstart.graphs.errors import GraphRefusedError
from coldstart.graphs.link import combine
from coldstart.graphs.record import Snapshot, number_allocations
from coldstart.graphs.tables import Kernel
from tests.support.graphs.random_graphs import KEY, Field, Program, judge, place, snapshot, third

SIZES = [4096, 8192, 12288]
SYMBOLS = ["param:w", "kv:0", "hidden"]


def _program(*fields: Field, size: int, layout: tuple[tuple[int, int], ...] | None = None) -> Program:
    program = Program(list(SYMBOLS), list(SIZES))
    program.kernels = [Kernel("k", "known", layout or ((0, size),))]
    program.nodes = [(0, list(fields))]
    return program


def test_equal_bases_prove_nothing_and_are_refused() -> None:
    program = _program(Field("pointer", 0, 8, 1, 8), size=8)
    bases = place(program, 1).bases
    shots = [snapshot(program, place(program, seed, bases=bases)) for seed in (1, 2)]
    with pytest.raises(GraphRefusedError, match="kv:0"):
        combine(*shots)


A = 0x7F0000100000


def test_a_reused_address_is_the_later_allocation() -> None:
    """Figure 6: two allocations with one address, the first freed before the capture."""
    events = [
        AllocationEvent(kind, A, size) for kind, size in (("alloc", 512), ("free", 512), ("alloc", 256))
    ]
    rows = number_allocations(events)
    assert rows[rows["live"]].tolist() == [(A, 256, 0, False, True)]


def test_allocations_are_numbered_by_size_inside_and_outside_of_the_pool() -> None:
    """So one more allocation of another size, in one process only, changes no other identity."""
    sizes = [(512, False), (512, True), (700, True), (512, True), (512, False)]
    events = [AllocationEvent("alloc", A + at * 4096, size, pool) for at, (size, pool) in enumerate(sizes)]
    assert number_allocations(events)["number"].tolist() == [0, 0, 0, 1, 1]


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


@pytest.mark.parametrize("at", [0, 8, 3])
def test_a_traced_allocation_that_did_not_move_is_a_collision_too(at: int) -> None:
    """One past its end, and in a packed struct as well."""
    filler = [Field("constant", 0, at, value=b"\x01" * at)] if at else []
    program = _program(*filler, Field("pointer", at, 8, 1, SIZES[1]), size=at + 8)
    program.symbols[1] = "alloc"
    shots = []
    for seed in (1, 2):
        placed = place(program, seed)
        placed.bases[1] = 0x7F9000000000
        placed.trace[:] = [AllocationEvent("alloc", placed.bases[1], SIZES[1])]
        shots.append(snapshot(program, placed))
    with pytest.raises(GraphRefusedError, match=r"alloc:8192\.0"):
        combine(*shots)
