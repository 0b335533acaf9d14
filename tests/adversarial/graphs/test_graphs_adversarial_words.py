"""Words that look like pointers or constants and are not."""

from __future__ import annotations

import pytest

from coldstart.graphs import trace as traces
from coldstart.graphs.api import AllocationEvent
from coldstart.graphs.combine import combine
from coldstart.graphs.errors import BaseCollisionError
from coldstart.graphs.link import find_broken_assumptions
from coldstart.graphs.snapshot import Snapshot
from coldstart.graphs.tables import Kernel, Tables
from tests.support.graphs.random_graphs import Field, Program, judge, place, region_bases, snapshot

SIZES = [4096, 8192, 12288]
SYMBOLS = ["param:w", "kv:0", "hidden:0"]


def _program(*fields: Field, size: int, layout: tuple[tuple[int, int], ...] | None = None) -> Program:
    program = Program(list(SYMBOLS), list(SIZES))
    program.kernels = [Kernel("k", None, layout or ((0, size),))]
    program.nodes = [(0, list(fields))]
    return program


def _combine(program: Program, seeds: tuple[int, int] = (1, 2)) -> Tables:
    return combine(*(snapshot(program, place(program, seed)) for seed in seeds)).tables


def _right(program: Program, tables: Tables) -> bool:
    found = judge(program, tables, place(program, 3))
    return found.corrupted == found.missed == 0


@pytest.mark.parametrize("at", [0, 4, 8, 12])
def test_interior_and_unaligned_pointers(at: int) -> None:
    fields = [Field("constant", 0, at, value=b"\x7f" * at)] if at else []
    program = _program(*fields, Field("pointer", at, 8, 1, 4099), size=at + 8)
    assert _right(program, _combine(program))


@pytest.mark.parametrize("at", [1, 3, 6])
def test_pointers_in_packed_structs(at: int) -> None:
    program = _program(
        Field("constant", 0, at, value=b"\x01" * at), Field("pointer", at, 8, 0, 32), size=at + 8
    )
    assert _right(program, _combine(program))


def _touching(seed: int, apart: bool) -> tuple[Program, list[int]]:
    program = _program(Field("pointer", 0, 8, 0, SIZES[0]), size=8)
    base = 0x7F1000000000 + seed * 0x10000000
    return program, [base, base + SIZES[0] + (1 << 20 if apart else 0), base + (1 << 24)]


def test_the_end_of_one_is_the_start_of_another_in_both_captures() -> None:
    """Two readings remain; a process in which they differ captures instead of guessing."""
    program, _ = _touching(1, apart=False)
    shots = [snapshot(program, place(program, s, bases=_touching(s, apart=False)[1])) for s in (1, 2)]
    tables = combine(*shots).tables
    third = place(program, 3, bases=_touching(3, apart=True)[1])
    assert find_broken_assumptions(tables, region_bases(program, tables.regions, third))
    same = place(program, 4, bases=_touching(4, apart=False)[1])
    assert not find_broken_assumptions(tables, region_bases(program, tables.regions, same))


def test_equal_bases_prove_nothing_and_are_refused() -> None:
    program = _program(Field("pointer", 0, 8, 1, 8), size=8)
    bases = place(program, 1).bases
    shots = [snapshot(program, place(program, seed, bases=bases)) for seed in (1, 2)]
    with pytest.raises(BaseCollisionError, match="kv:0"):
        combine(*shots)


def test_a_word_that_points_elsewhere_each_time_is_a_conflict() -> None:
    program = _program(Field("pointer", 0, 8, 0, 8), size=8)
    a = snapshot(program, place(program, 1))
    program.nodes = [(0, [Field("pointer", 0, 8, 1, 16)])]
    b = snapshot(program, place(program, 2))
    combined = combine(a, b)
    assert list(combined.tables.refused) == ["g"] and not combined.tables.keys


A, B = 0x7F0000100000, 0x7F0000200000
REUSED = [
    AllocationEvent("alloc", A, 512),
    AllocationEvent("free", A, 512),
    AllocationEvent("alloc", A, 512),
]
"""Figure 6: two allocations with one address, the first freed before the capture."""


def test_a_reused_address_is_the_later_allocation() -> None:
    found = traces.match_live(traces.pack(REUSED), [A + 40, A + 512, B])
    assert found == {A + 40: ((1, 40, 512), None), A + 512: (None, (1, 512, 512))}


def test_a_freed_allocation_is_no_match_when_its_address_was_reused_for_less() -> None:
    events = [*REUSED[:2], AllocationEvent("alloc", A, 256)]
    found = traces.match_live(traces.pack(events), [A, A + 300, A + 512])
    assert found == {A: ((1, 0, 256), None)}


def test_a_third_capture_settles_the_two_readings() -> None:
    program, _ = _touching(1, apart=False)
    a, b = (snapshot(program, place(program, s, bases=_touching(s, apart=False)[1])) for s in (1, 2))
    tables = combine(a, b, [snapshot(program, place(program, 5, bases=_touching(5, apart=True)[1]))]).tables
    assert len(tables.assumed) == 0
    assert judge(program, tables, place(program, 3, bases=_touching(3, apart=True)[1])).missed == 0


def _in_segment(seed: int) -> Snapshot:
    """Return a word that points into the unused rest of a segment of the framework."""
    program = _program(Field("pointer", 0, 8, 2, 4096), size=8)
    placed = place(program, seed)
    placed.trace.insert(0, AllocationEvent("alloc", placed.bases[2], 512))
    return snapshot(program, placed)


def test_a_framework_segment_is_never_adopted_as_library_memory() -> None:
    tables = combine(_in_segment(1), _in_segment(2)).tables
    assert list(tables.refused) == ["g"]


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
        placed.trace.insert(0, AllocationEvent("alloc", placed.bases[1], SIZES[1]))
        shots.append(snapshot(program, placed))
    with pytest.raises(BaseCollisionError, match="alloc#0"):
        combine(*shots)
