"""Graphs that must be refused with a reason for the user, and words that look like pointers or constants and are not."""

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.graphs_tools import offline

from coldstart.graphs.api import AllocationEvent
from coldstart.graphs.errors import GraphRefusedError
from coldstart.graphs.link import combine
from coldstart.graphs.record import Snapshot, drop_aliases
from coldstart.graphs.tables import Kernel, SymbolRegion
from tests.support.graphs.images import cubin
from tests.support.graphs.model import IMAGE, OTHER, Shape, SimModel, layout
from tests.support.graphs.random_graphs import KEY, Field, Program, judge, place, snapshot, third

TWICE = ("k_scale", layout("k_scale"))


def _add(kind: int) -> Callable[[SimModel, int], Any]:
    return lambda model, graph: model.fake.fake_add_node(graph, kind)


def _copy_from_the_host(model: SimModel, graph: int) -> None:
    model.fake.fake_pin(host := model.allocate(512))
    model.copy(graph, host, model.at("static:out"), 16)


def _scale(name: str, *, pinned: bool = False) -> Callable[[SimModel, int], None]:
    def add(model: SimModel, graph: int) -> None:
        source = model.allocate(512) if pinned else model.at("param:norm")
        if pinned:
            model.fake.fake_pin(source)
        model.launch(graph, name, struct.pack("<QQI", source, model.at("static:out"), 1), library=2)

    return add


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        *((_add(kind), f"_TYPE_{name}") for kind, name in ((3, "HOST"), (4, "GRAPH"), (10, "MEM_ALLOC"), (13, "CONDITIONAL"))),
        (_copy_from_the_host, "host memory"),
        (_scale("k_scale", pinned=True), "pinned host pointer"),
        (_scale("k_counts"), "mutable globals"),
        (_scale("ncclDevKernel_AllReduce"), "collective"),
    ],
)  # fmt: skip
def test_immovable_graph_is_refused_with_reason(spoil: Callable[[SimModel, int], Any], reason: str) -> None:
    class Spoilt(SimModel):
        def build(self, size: int) -> int:
            spoil(self, graph := super().build(size))
            return graph

    state = cubin({"k_counts": TWICE}, globals_=("counter",)) if reason == "mutable globals" else cubin(
        {"ncclDevKernel_AllReduce": TWICE, "k_scale": TWICE}
    )  # fmt: skip
    snapshot = offline(5, Spoilt(Shape("one", 1, sizes=(8,)), 5, (IMAGE, OTHER, state)))
    assert reason in snapshot.tables.refused.get("decode:8", "")


def test_a_kernel_is_refused_when_the_second_process_does_not_know_its_binary() -> None:
    """The first may not: a process that compiles several candidates cannot tell which it launches; the proof decides."""
    a, b = offline(11), offline(12)
    a.tables.kernels[:] = [replace(k, binary=None) for k in a.tables.kernels]
    assert combine(a, b).refused == {}
    b.tables.kernels[:] = [replace(k, binary=None) if k.name == "k_split" else k for k in b.tables.kernels]
    tables = combine(a, b)
    assert sorted(tables.graphs) == ["decode:256", "decode:64"]
    assert "k_split cannot be restored: its binary is unknown" in tables.refused["decode:1"]


def test_graphs_that_differ_between_two_processes_are_refused() -> None:
    a, b = offline(11), offline(12)
    b.tables.graphs["decode:8"].nodes["grid"][1] = 9
    del b.tables.graphs["decode:1"]
    tables = combine(a, b)
    assert sorted(tables.graphs) == ["decode:256", "decode:64"]
    assert "differ" in tables.refused["decode:8"] and "only one of the" in tables.refused["decode:1"]


def test_a_refusal_names_kernel_byte_addresses_and_memory() -> None:
    a, b = offline(11), offline(12)
    graph = b.tables.graphs["decode:8"]
    at = int(graph.nodes["payload"][1]) + 8  # the second parameter of `k_gather`, a weight
    graph.payload = graph.payload.copy()
    (weight,), (kv,) = (
        [r for r in s.regions if r.symbol == name] for s, name in ((a, "param:embed"), (b, "kv:0"))
    )
    graph.payload[at : at + 8] = np.frombuffer((kv.base + 64).to_bytes(8, "little"), np.uint8)
    assert combine(a, b).refused == {
        "decode:8": "k_gather, parameter byte 8: the two captures contain pointers to different places in live memory: "
        f"{weight.base:#x} (param:embed+0) and {kv.base + 64:#x} (kv:0+64)"
    }


def test_views_of_one_storage_are_one_region() -> None:
    spans = {"param:tied": (64, 512), "param:embed": (64, 512), "buffer:part": (8, 520)}
    views = [SymbolRegion(symbol, *span) for symbol, span in spans.items()]
    assert [r.symbol for r in drop_aliases(views)] == ["param:embed"]


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
