"""Random graphs: no constant corrupted, no pointer missed, or a refusal. The benchmark runs 10,000."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tools.examples import examples

from coldstart.graphs.combine import combine
from coldstart.graphs.errors import GraphError
from coldstart.graphs.link import find_broken_assumptions
from tests.support.graphs.random_graphs import generate, judge, place, region_bases, snapshot


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
