"""Random graphs with a known truth: which parameter bytes are pointers, constants, or padding.

A program is what every process shares; a placement is one process's addresses.  The truth for a process is
the program evaluated at its placement, so a classifier is judged by a third placement that it never saw.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from coldstart.graphs import trace as traces
from coldstart.graphs.api import AllocationEvent, Edge, KernelNode, Range
from coldstart.graphs.builder import Builder
from coldstart.graphs.link import relocate
from coldstart.graphs.snapshot import MAP, Snapshot
from coldstart.graphs.tables import Array, Kernel, SymbolRegion, Tables

LOW, HIGH, ALIGN = 0x7F0000000000, 0x7F8000000000, 512
NAMES = ("param:w{}", "buffer:b{}", "kv:{}", "static:s{}", "pool:{}", "hidden:{}", "alloc")


@dataclass(frozen=True)
class Field:
    """`kind` is pointer (region, offset), constant (bytes) or stale (random bytes in every process)."""

    kind: str
    at: int
    size: int
    region: int = 0
    offset: int = 0
    value: bytes = b""


@dataclass
class Program:
    """`sizes` are unique, so that a size identifies a library region; `churn` are (size, keep) allocations."""

    symbols: list[str]
    sizes: list[int]
    kernels: list[Kernel] = field(default_factory=list)
    nodes: list[tuple[int, list[Field]]] = field(default_factory=list)
    edges: list[tuple[int, int, int]] = field(default_factory=list)
    churn: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Placement:
    """Addresses of one process; `trace` holds its allocations."""

    bases: list[int]
    trace: list[AllocationEvent]
    noise: random.Random


def place(program: Program, seed: int, *, bases: list[int] | None = None) -> Placement:
    """Return random bases with some adjacent regions and randomly reused addresses."""
    rng = random.Random(seed)
    chosen = bases or _bases(program, rng)
    trace, chosen = _trace(program, rng, chosen)
    return Placement(chosen, trace, random.Random(seed ^ 0x5EED))


def _bases(program: Program, rng: random.Random) -> list[int]:
    slots = rng.sample(range(LOW, HIGH, 1 << 24), len(program.sizes))
    bases: list[int] = []
    for number, slot in enumerate(slots):
        before = bases[-1] + program.sizes[number - 1] if bases else 1
        # Adjacency in one process only makes one address two readings.
        bases.append(
            before if before % ALIGN == 0 and rng.random() < 0.3 else slot + rng.randrange(1 << 14) * ALIGN
        )
    return bases


def _trace(program: Program, rng: random.Random, bases: list[int]) -> tuple[list[AllocationEvent], list[int]]:
    """Return churn before the retained allocations, which may reuse a freed address (Figure 6)."""
    events: list[AllocationEvent] = []
    chosen, freed = list(bases), [0][:0]
    for size, keep in program.churn:
        base = freed.pop() if freed and rng.random() < 0.7 else rng.randrange(HIGH, HIGH + (1 << 40), 1 << 21)
        events.append(AllocationEvent("alloc", base, size))
        if keep >= 0:
            chosen[keep] = base
        else:
            events.append(AllocationEvent("free", base, size))
            freed.append(base)
    return events, chosen


def snapshot(program: Program, placement: Placement) -> Snapshot:
    """Return the snapshot that capture.take would take in that process."""
    builder = Builder()
    builder.begin("g", 1)
    for kernel, fields in program.nodes:
        node = KernelNode(0, (1, 1, 1), (1, 1, 1), 0, payload(program, kernel, fields, placement, noisy=True))
        builder.kernel(node, program.kernels[kernel])
    builder.finish(range(len(program.nodes)), [Edge(a, b, 0, 0, t) for a, b, t in program.edges])
    everything = list(zip(program.symbols, program.sizes, placement.bases, strict=True))
    return Snapshot(
        tables=builder.tables(),
        regions=[SymbolRegion(s, n, b) for s, n, b in everything if not s.startswith(("hidden", "alloc"))],
        ranges=[Range(b, n) for s, n, b in everything if s.startswith("hidden")],
        trace=traces.pack(placement.trace),
        maps=np.zeros(0, MAP), contents={}, binaries={},
    )  # fmt: skip


def payload(
    program: Program, kernel: int, fields: list[Field], placement: Placement, *, noisy: bool
) -> bytes:
    """Return packed parameters at a placement; padding is random if `noisy`, else zero."""
    out = bytearray(program.kernels[kernel].size)
    for f in fields:
        if f.kind == "pointer":
            data = (placement.bases[f.region] + f.offset).to_bytes(8, "little")
        else:
            data = (
                f.value
                if f.kind == "constant"
                else _stale(placement.noise, f.size)
                if noisy
                else bytes(f.size)
            )
        out[f.at : f.at + f.size] = data
    return bytes(out)


def _stale(noise: random.Random, size: int) -> bytes:
    """Return stale stack bytes, often a host address with the prefix of device addresses."""
    if size == 8 and noise.random() < 0.7:
        return noise.randrange(0x7FFC00000000, 0x7FFFFFFFFFFF).to_bytes(8, "little")
    return noise.randbytes(size)


@dataclass
class Judgement:
    """Number of wrong words in the third placement."""

    corrupted: int
    missed: int


def judge(program: Program, tables: Tables, placement: Placement) -> Judgement:
    """Relocate to a placement and compare every pointer and constant with the truth there."""
    out = relocate(tables.payload, tables.relocations, region_bases(program, tables.regions, placement))
    corrupted = missed = 0
    for number, (kernel, fields) in enumerate(program.nodes):
        start = int(tables.nodes["payload"][number])
        got = out[start : start + program.kernels[kernel].size].tobytes()
        want = payload(program, kernel, fields, placement, noisy=False)
        for f in fields:
            wrong = got[f.at : f.at + f.size] != want[f.at : f.at + f.size]
            corrupted += wrong and f.kind == "constant"
            missed += wrong and f.kind == "pointer"
    return Judgement(corrupted, missed)


def region_bases(program: Program, regions: list[SymbolRegion], placement: Placement) -> Array:
    """Return addresses of the bundle's symbols; unique sizes identify library and traced regions."""
    by_symbol = dict(zip(program.symbols, placement.bases, strict=True))
    by_size = dict(zip(program.sizes, placement.bases, strict=True))
    return np.array([by_symbol.get(r.symbol, by_size.get(r.size, 0)) for r in regions], np.uint64)


def generate(seed: int) -> Program:
    """Return a random program: regions of all kinds, churn, structs with holes, a random directed acyclic graph."""
    rng = random.Random(seed)
    count = rng.randrange(4, 12)
    symbols = [rng.choice(NAMES).format(i) for i in range(count)]
    program = Program(symbols, [ALIGN * (8 + i) + rng.choice((0, 0, 64)) * 1 for i in range(count)])
    program.sizes = [size + 8 * i if size % ALIGN else size for i, size in enumerate(program.sizes)]
    for number, symbol in enumerate(symbols):
        if symbol.startswith("alloc"):
            program.churn += [(program.sizes[number], -1)] * rng.randrange(3) + [
                (program.sizes[number], number)
            ]
    lookalikes = place(program, seed * 3 + 1).bases
    for _ in range(rng.randrange(2, 9)):
        fields, layout = _node(rng, program, lookalikes)
        kernel = Kernel(f"k{len(program.kernels)}", None, layout)
        program.kernels.append(kernel)
        program.nodes.append((len(program.kernels) - 1, fields))
    size = len(program.nodes)
    pairs = [(a, b) for a in range(size) for b in range(a + 1, size)]
    program.edges = [(a, b, rng.randrange(2)) for a, b in pairs if rng.random() < 0.3]
    return program


def _node(
    rng: random.Random, program: Program, lookalikes: list[int]
) -> tuple[list[Field], tuple[tuple[int, int], ...]]:
    """Return parameters: scalars, and by-value structs with holes between fields, some packed."""
    fields: list[Field] = []
    layout: list[tuple[int, int]] = []
    at = 0
    for _ in range(rng.randrange(1, 5)):
        at = -(-at // 8) * 8
        inner = rng.randrange(1, 6) if rng.random() < 0.5 else 1
        step, start = rng.choice((8, 8, 8, 4, 1)) if inner > 1 else 8, at
        for _ in range(inner):
            one = _field(rng, program, lookalikes, at, step)
            fields.append(one)
            at += one.size
            hole = -at % step
            if hole:
                fields.append(Field("stale", at, hole))
                at += hole
        layout.append((start, at - start))
    return fields, tuple(layout)


def _field(rng: random.Random, program: Program, lookalikes: list[int], at: int, step: int) -> Field:
    kind = rng.random()
    if kind < 0.45:
        region = rng.randrange(len(program.sizes))
        hidden = program.symbols[region].startswith("hidden")
        size = program.sizes[region]
        choices = (0, rng.randrange(size), size - 1) if hidden else (0, rng.randrange(size), size)
        return Field("pointer", at, 8, region, rng.choice(choices))
    if kind < 0.6:
        number = rng.randrange(len(lookalikes))
        value = lookalikes[number] + rng.randrange(program.sizes[number])
        return Field("constant", at, 8, value=value.to_bytes(8, "little"))
    if kind < 0.7:
        return Field("stale", at, 8)
    size = rng.choice((8, 4, 4)) if step != 1 else rng.choice((1, 2, 4, 8))
    return Field(
        "constant", at, size, value=rng.choice((rng.randbytes(size), bytes(size), b"\1" + bytes(size - 1)))
    )
