"""Random graphs with a known truth: which parameter bytes are pointers, constants, or padding.

A program is what every process shares; a placement is one process's addresses.  The truth for a process is
the program evaluated at its placement, so a classifier is judged by a third placement that it never saw.
"""

import random
from dataclasses import dataclass, field

import numpy as np

from coldstart.graphs.api import AllocationEvent, KernelNode
from coldstart.graphs.link import relocate
from coldstart.graphs.record import MAP, GraphBuilder, Snapshot, number_allocations
from coldstart.graphs.tables import DEVICE, Array, Kernel, SymbolRegion, Tables

LOW, HIGH, ALIGN = 0x7F0000000000, 0x7F8000000000, 512
NAMED = ("param:w{}", "buffer:b{}", "kv:{}", "static:s{}")
SEGMENT = 1 << 16
KEY = "g"


@dataclass(frozen=True)
class Field:
    """`kind` is pointer (memory, offset), constant (bytes) or stale (random bytes in every process)."""

    kind: str
    at: int
    size: int
    memory: int = 0
    offset: int = 0
    value: bytes = b""


@dataclass
class Program:
    """Memory by symbol and size: named, `hidden` (a library's, of unique size), `alloc` (unnamed) and `pool`.

    `frees` has for each allocation of the pool how many later ones are made before it is freed, or None.
    """

    symbols: list[str]
    sizes: list[int]
    frees: dict[int, int | None] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)
    nodes: list[tuple[int, list[Field]]] = field(default_factory=list)
    edges: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class Placement:
    """Addresses of one process: of all memory, the segments of its pool, and its allocations."""

    bases: list[int]
    segments: list[SymbolRegion]
    trace: list[AllocationEvent]
    noise: random.Random


def place(
    program: Program, seed: int, *, bases: list[int] | None = None, segment: int | None = None
) -> Placement:
    """Return random bases with some adjacent regions, and a pool whose freed memory is used again at random.

    Without `segment` the size of the pool's segments is random, so that processes have different numbers of them.
    """
    rng = random.Random(seed)
    chosen, trace = list(bases or _bases(program, rng)), list[AllocationEvent]()
    for number, (symbol, size) in enumerate(zip(program.symbols, program.sizes, strict=True)):
        # Memory that every process allocates and frees, more or less often.
        for _ in range(rng.randrange(3) if symbol == "alloc" else 0):
            churned = rng.randrange(HIGH, HIGH + (1 << 40), 1 << 21)
            trace += [AllocationEvent(kind, churned, size + 8) for kind in ("alloc", "free")]
            if bases is None and rng.random() < 0.3:
                chosen[number] = churned  # the address of memory that was freed (Figure 6)
        if symbol == "alloc":
            trace.append(AllocationEvent("alloc", chosen[number], size))
    pool = _Pool(rng, segment or rng.choice((1, 2, 4)) * SEGMENT)
    for number in program.frees:
        if rng.random() < 0.2:  # an allocation that only this process makes, of a size that no other has
            pool.allocate(100 + 8 * (rng.randrange(1 << 10)) + 1)
        chosen[number] = pool.allocate(program.sizes[number])
        for other, later in program.frees.items():
            if later is not None and other + later == number:
                pool.free(chosen[other])
    return Placement(chosen, pool.segments, trace + pool.trace, random.Random(seed ^ 0x5EED))


class _Pool:
    """Allocator of one process; a fitting hole is used or not, and segments are as large as it takes."""

    def __init__(self, rng: random.Random, segment: int) -> None:
        self._rng, self._segment = rng, segment
        self._holes, self._sizes = list[tuple[int, int]](), dict[int, int]()
        self.segments, self.trace = list[SymbolRegion](), list[AllocationEvent]()

    def allocate(self, size: int) -> int:
        taken = -(-size // ALIGN) * ALIGN
        fitting = [hole for hole in self._holes if hole[1] >= taken]
        if not fitting:
            base = self._rng.randrange(1 << 45, 1 << 46, 1 << 21)
            self.segments.append(SymbolRegion(f"pool:{len(self.segments)}", max(taken, self._segment), base))
            self._holes.append((base, max(taken, self._segment)))
            fitting = self._holes[-1:]
        hole = self._rng.choice(fitting)
        self._holes.remove(hole)
        self._holes += [(hole[0] + taken, hole[1] - taken)] if hole[1] > taken else []
        self._sizes[hole[0]] = taken
        self.trace.append(AllocationEvent("alloc", hole[0], size, pool=True))
        return hole[0]

    def free(self, address: int) -> None:
        self._holes.append((address, self._sizes.pop(address)))
        self.trace.append(AllocationEvent("free", address, 0, pool=True))


def _bases(program: Program, rng: random.Random) -> list[int]:
    slots = rng.sample(range(LOW, HIGH, 1 << 24), len(program.sizes))
    bases: list[int] = []
    for number, slot in enumerate(slots):
        before = bases[-1] + program.sizes[number - 1] if bases else 1
        # Adjacency in one process only makes one address two readings.
        touching = before % ALIGN == 0 and number not in program.frees and rng.random() < 0.3
        bases.append(before if touching else slot + rng.randrange(1 << 14) * ALIGN)
    return bases


def snapshot(program: Program, placement: Placement) -> Snapshot:
    """Return the snapshot that record.create_snapshot would return in that process."""
    builder = GraphBuilder()
    for kernel, fields in program.nodes:
        data = payload(program, kernel, fields, placement.bases, placement.noise)
        builder.add_kernel(KernelNode(0, (1, 1, 1), (1, 1, 1), 0, data), program.kernels[kernel])
    edges = [(a, b, 0, 0, t) for a, b, t in program.edges]
    builder.finish(KEY, 1, range(len(program.nodes)), edges)
    everything = list(zip(program.symbols, program.sizes, placement.bases, strict=True))
    named = [SymbolRegion(s, n, b) for s, n, b in everything if ":" in s]
    return Snapshot(
        tables=builder.build_tables({}), regions=named, pool=placement.segments,
        ranges=[SymbolRegion(DEVICE, n, b) for s, n, b in everything if s == "hidden"],
        allocations=number_allocations(placement.trace),
        maps={KEY: np.zeros(0, MAP)}, contents={}, binaries={},
    )  # fmt: skip


def payload(
    program: Program, kernel: int, fields: list[Field], bases: list[int], noise: random.Random | None
) -> bytes:
    """Return packed parameters at these bases; padding is random, or zero without `noise`."""
    out = bytearray(program.kernels[kernel].size)
    for f in fields:
        data = f.value
        if f.kind == "pointer":
            data = (bases[f.memory] + f.offset).to_bytes(8, "little")
        elif f.kind == "stale":
            data = noise.randbytes(f.size) if noise else bytes(f.size)
            if noise and f.size == 8 and noise.random() < 0.7:
                # Often a host address with the prefix of device addresses.
                data = noise.randrange(0x7FFC00000000, 0x7FFFFFFFFFFF).to_bytes(8, "little")
        out[f.at : f.at + f.size] = data
    return bytes(out)


@dataclass
class Third:
    """Third process: the addresses of the bundle's regions, and those of the program's memory that follow from them."""

    base: Array
    bases: list[int]


def third(
    program: Program, tables: Tables, second: Placement, seed: int, bases: list[int] | None = None
) -> Third:
    """Return a process that has named memory of its own, and the bundle's memory as the second process laid it out."""
    rng = random.Random(seed)
    own = bases or place(program, seed).bases
    provided = {r.symbol: rng.randrange(1 << 44, 1 << 45, 1 << 21) for r in tables.regions}
    by_symbol = dict(zip(program.symbols, own, strict=True))
    at = {r.symbol: by_symbol.get(r.symbol, provided[r.symbol]) for r in tables.regions}
    sizes = {r.size: at[r.symbol] for r in tables.regions if r.symbol.startswith(("lib:", "alloc:"))}
    moved = list[int]()
    for number, (symbol, base) in enumerate(zip(program.symbols, second.bases, strict=True)):
        held = next((s for s in second.segments if s.base <= base < s.base + s.size), None)
        own_base = at.get(symbol, own[number]) if ":" in symbol else sizes.get(program.sizes[number], 0)
        inside = number in program.frees and held is not None
        moved.append(at.get(held.symbol, 0) + base - held.base if inside and held else own_base)
    return Third(np.array([at[r.symbol] for r in tables.regions], np.uint64), moved)


def judge(program: Program, tables: Tables, process: Third) -> tuple[int, int]:
    """Relocate to a process; return how many constants and how many pointers are not the truth there."""
    graph = tables.graphs[KEY]
    out = relocate(graph.payload, graph.relocations, process.base, None)  # type: ignore[arg-type]
    corrupted = missed = 0
    for number, (kernel, fields) in enumerate(program.nodes):
        start = int(graph.nodes["payload"][number])
        got = out[start : start + program.kernels[kernel].size].tobytes()
        want = payload(program, kernel, fields, process.bases, None)
        for f in fields:
            wrong = got[f.at : f.at + f.size] != want[f.at : f.at + f.size]
            corrupted += wrong and f.kind == "constant"
            missed += wrong and f.kind == "pointer"
    return corrupted, missed


def generate(seed: int) -> Program:
    """Return a random program: memory of all kinds, structs with holes, a random directed acyclic graph."""
    rng = random.Random(seed)
    count = rng.randrange(4, 12)
    symbols = [rng.choice((*NAMED, "hidden", "alloc")).format(i) for i in range(count)]
    sizes = [ALIGN * (8 + i) + rng.choice((0, 0, 64)) for i in range(count)]
    program = Program(symbols, [size + 8 * i if size % ALIGN else size for i, size in enumerate(sizes)])
    # Few sizes: the number among those of a size identifies an allocation.
    for _ in range(rng.randrange(0, 9)):
        program.frees[len(program.symbols)] = rng.choice((None, 0, 1, 2, 4))
        program.symbols.append("pool")
        program.sizes.append(rng.choice((ALIGN, 3 * ALIGN, 700, 1 << 15)))
    lookalikes = place(program, seed * 3 + 1).bases
    for _ in range(rng.randrange(2, 9)):
        fields, layout = _node(rng, program, lookalikes)
        program.kernels.append(Kernel(f"k{len(program.kernels)}", "known", layout))
        program.nodes.append((len(program.kernels) - 1, fields))
    size = len(program.nodes)
    pairs = [(a, b) for a in range(size) for b in range(a + 1, size)]
    program.edges = [(a, b, rng.randrange(2)) for a, b in pairs if rng.random() < 0.3]
    return program


Layout = tuple[tuple[int, int], ...]


def _node(rng: random.Random, program: Program, lookalikes: list[int]) -> tuple[list[Field], Layout]:
    """Return parameters: scalars, and by-value structs with holes between fields, some packed."""
    fields, layout, at = list[Field](), list[tuple[int, int]](), 0
    for _ in range(rng.randrange(1, 5)):
        at = -(-at // 8) * 8
        inner = rng.randrange(1, 6) if rng.random() < 0.5 else 1
        step, start = rng.choice((8, 8, 8, 4, 1)) if inner > 1 else 8, at
        for _ in range(inner):
            fields.append(one := _field(rng, program, lookalikes, at, step))
            at += one.size
            if hole := -at % step:
                fields.append(Field("stale", at, hole))
                at += hole
        layout.append((start, at - start))
    return fields, tuple(layout)


def _field(rng: random.Random, program: Program, lookalikes: list[int], at: int, step: int) -> Field:
    kind = rng.random()
    if kind < 0.45:
        memory = rng.randrange(len(program.sizes))
        size = program.sizes[memory]
        end = size - 1 if program.symbols[memory] == "hidden" else size
        return Field("pointer", at, 8, memory, rng.choice((0, rng.randrange(size), end)))
    if kind < 0.6:
        number = rng.randrange(len(lookalikes))
        value = lookalikes[number] + rng.randrange(program.sizes[number])
        return Field("constant", at, 8, value=value.to_bytes(8, "little"))
    if kind < 0.7:
        return Field("stale", at, 8)
    size = rng.choice((8, 4, 4)) if step != 1 else rng.choice((1, 2, 4, 8))
    values = (rng.randbytes(size), bytes(size), b"\1" + bytes(size - 1))
    return Field("constant", at, size, value=rng.choice(values))
