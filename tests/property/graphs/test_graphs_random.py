"""Random graphs: no constant corrupted, no pointer missed, or a refusal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.examples import examples

from coldstart.graphs.link import combine
from coldstart.graphs.tables import Kernel
from tests.support.graphs.random_graphs import (
    KEY,
    LOW,
    Field,
    Program,
    generate,
    judge,
    place,
    snapshot,
    third,
)


def judge_seed(seed: int) -> bool:
    """Return whether the graph was judged right in a third process; False if it has words of two readings."""
    program = generate(seed)
    a, b = (place(program, seed * 3 + i) for i in (1, 2))
    tables = combine(snapshot(program, a), snapshot(program, b))
    assert tables.refused == {}
    if tables.report["two_readings"]:
        return False
    found = judge(program, tables, third(program, tables, b, seed * 3 + 3))
    assert (found.corrupted, found.missed) == (0, 0), seed
    return True


@examples(250)
@given(st.integers(0, 1 << 40))
def test_classification_is_the_truth_at_a_layout_never_seen(seed: int) -> None:
    judge_seed(seed)


@pytest.mark.nightly
def test_ten_thousand_random_graphs() -> None:
    """The property above must not hold because most graphs have words of two readings."""
    assert sum(map(judge_seed, range(10_000))) >= 8_500


def test_most_graphs_have_one_reading() -> None:
    assert sum(map(judge_seed, range(100))) >= 80


@examples(50)
@given(st.integers(0, 1 << 40))
def test_edges_and_their_data_are_kept(seed: int) -> None:
    program = generate(seed)
    tables = combine(*(snapshot(program, place(program, seed * 3 + i)) for i in (1, 2)))
    rows = tables.graphs[KEY].edges[["source", "target", "type"]].tolist()
    assert rows == sorted(program.edges)


def _touching(*symbols: str) -> tuple[Program, list[list[int]]]:
    """Return a program whose word is the end of the first memory, with bases at which the second one starts there."""
    program = Program(list(symbols), [4096, 8192])
    program.kernels.append(Kernel("k", "known", ((0, 8),)))
    program.nodes.append((0, [Field("pointer", 0, 8, 0, 4096)]))
    return program, [[LOW + at, LOW + at + 4096] for at in (0, 1 << 30)]


def test_pointer_is_read_as_the_start_of_a_library_region_when_a_named_one_ends_there() -> None:
    program, bases = _touching("param:w0", "hidden")
    program.nodes[0] = (0, [Field("pointer", 0, 8, memory=1)])
    a, b = (place(program, 0, bases=one) for one in bases)
    tables = combine(snapshot(program, a), snapshot(program, b))
    apart = third(program, tables, b, 1, [LOW + (1 << 31), 0])
    assert tables.report["two_readings"] == 1 and judge(program, tables, apart).missed == 0


def test_the_end_of_an_unnamed_allocation_is_left_to_the_proof_when_no_other_word_points_into_it() -> None:
    """The word is read as the start of what touches it, and the proof in another process shows that this is wrong."""
    program, bases = _touching("alloc", "param:w0")
    a, b = (place(program, 0, bases=one) for one in bases)
    tables = combine(snapshot(program, a), snapshot(program, b))
    process = third(program, tables, b, 1)
    assert judge(program, tables, process).missed == tables.report["two_readings"] == 1
