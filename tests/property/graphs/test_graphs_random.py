"""Random graphs: no constant corrupted, no pointer missed, or a refusal."""

import pytest

from coldstart.graphs.link import combine
from coldstart.graphs.tables import Kernel
from tests.support.graphs import random_graphs as rand
from tests.support.graphs.random_graphs import KEY, LOW, Placement, Program, judge, place, snapshot, third


def has_two_readings(program: Program, *placements: Placement) -> bool:
    """Return whether an address one past the end of memory is the start of other memory in all these processes."""
    ends = [
        f.memory
        for _, fields in program.nodes
        for f in fields
        if f.kind == "pointer" and f.offset == program.sizes[f.memory]
    ]
    return any(all(p.bases[end] + program.sizes[end] in p.bases for p in placements) for end in ends)


def judge_seed(seed: int) -> bool:
    """Return whether a random graph is right in a third process; it may only be wrong if a word has two readings."""
    program = rand.generate(seed)
    a, b = (place(program, seed * 3 + i) for i in (1, 2))
    tables = combine(snapshot(program, a), snapshot(program, b))
    assert tables.refused == {}
    edges = tables.graphs[KEY].edges[["source", "target", "type"]].tolist()
    corrupted, missed = judge(program, tables, third(program, tables, b, seed * 3 + 3))
    assert corrupted == 0 and edges == sorted(program.edges), seed
    assert not missed or has_two_readings(program, a, b), seed
    return not missed


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_classification_of_random_graphs_is_the_truth_at_a_layout_never_seen(count: int) -> None:
    assert sum(map(judge_seed, range(count))) >= 0.9 * count


@pytest.mark.parametrize("symbol", ["hidden", "alloc", "kv:0"])
def test_word_is_the_start_of_a_region_when_another_one_ends_there(symbol: str) -> None:
    program = Program(["param:w0", symbol], [4096, 8192])
    program.kernels.append(Kernel("k", "known", ((0, 8),)))
    program.nodes.append((0, [rand.Field("pointer", 0, 8, memory=1)]))
    a, b = (place(program, 0, bases=[LOW + at, LOW + at + 4096]) for at in (0, 1 << 30))
    tables = combine(snapshot(program, a), snapshot(program, b))
    apart = third(program, tables, b, 1, [LOW + (1 << 31), LOW + (1 << 32)])
    assert judge(program, tables, apart)[1] == 0
