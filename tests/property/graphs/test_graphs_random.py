"""Random graphs: no constant corrupted, no pointer missed, or a refusal. The benchmark runs 10,000."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tools.examples import examples

from coldstart.graphs.combine import combine
from coldstart.graphs.errors import GraphError
from coldstart.graphs.link import find_broken_assumptions
from coldstart.graphs.tables import Kernel
from tests.support.graphs.random_graphs import (
    LOW,
    Field,
    Program,
    generate,
    judge,
    place,
    region_bases,
    snapshot,
)


@examples(250)
@given(st.integers(0, 1 << 40))
def test_classification_is_the_truth_at_a_layout_never_seen(seed: int) -> None:
    program = generate(seed)
    a, b, third = (place(program, seed * 3 + i) for i in (1, 2, 3))
    try:
        tables = combine(snapshot(program, a), snapshot(program, b)).tables
    except GraphError:
        return
    if not tables.keys or find_broken_assumptions(tables, region_bases(program, tables.regions, third)):
        return
    found = judge(program, tables, third)
    assert (found.corrupted, found.missed) == (0, 0)


@examples(50)
@given(st.integers(0, 1 << 40))
def test_edges_and_their_data_are_kept(seed: int) -> None:
    program = generate(seed)
    tables = combine(*(snapshot(program, place(program, seed * 3 + i)) for i in (1, 2))).tables
    rows = tables.edges[["source", "target", "type"]].tolist()
    assert rows == sorted(program.edges) or not tables.keys


def test_few_graphs_are_refused_or_ambiguous() -> None:
    """The property above must not hold by refusing everything."""
    judged = 0
    for seed in range(100):
        program = generate(seed)
        a, b, third = (place(program, seed * 3 + i) for i in (1, 2, 3))
        tables = combine(snapshot(program, a), snapshot(program, b)).tables
        judged += bool(tables.keys) and not find_broken_assumptions(
            tables, region_bases(program, tables.regions, third)
        )
    assert judged >= 80


def test_pointer_is_read_as_the_start_of_a_library_region_when_a_named_one_ends_there() -> None:
    program = Program(["param:w0", "hidden:0"], [4096, 8192])
    program.kernels.append(Kernel("k", None, ((0, 8),)))
    program.nodes.append((0, [Field("pointer", 0, 8, region=1)]))
    a, b, apart = (
        place(program, 0, bases=[LOW + base, LOW + base + 4096 + gap])
        for base, gap in ((0, 0), (1 << 30, 0), (1 << 31, 512))
    )
    tables = combine(snapshot(program, a), snapshot(program, b)).tables
    broken = find_broken_assumptions(tables, region_bases(program, tables.regions, apart))
    assert broken or judge(program, tables, apart).missed == 0
