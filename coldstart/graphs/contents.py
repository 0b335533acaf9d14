"""Copy-free contents by poisoning: keep a 512-byte block only if some replay's output needs it.

Weights are never candidates.  Everything else that graphs own (pool segments, adopted library allocations) is
filled with a pattern before a replay; where outputs change, the poisoned set is halved until single blocks
remain.  Two patterns, since a block may hold one of them by chance.  (Section 4.3, by test, not by rule.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from coldstart.graphs.api import Captured, DriverApi, Workload
from coldstart.graphs.builder import drop_unused_regions
from coldstart.graphs.errors import GraphError
from coldstart.graphs.materialize import Combined
from coldstart.graphs.table import BLOCK, RELOCATION, Array, Tables

BLOCK_BYTES = 512
PATTERNS = (0xFF, 0x5A)
Span = tuple[int, int, int]


@dataclass
class Bench:
    """A live process whose captured graphs can be replayed over chosen contents.

    `areas` are the adopted regions as (address, size, position in `contents`); `spans` are their blocks.
    """

    driver: DriverApi
    workload: Workload
    captured: dict[str, Captured]
    areas: Sequence[Span]
    contents: bytes
    seed: int = 11

    def __post_init__(self) -> None:
        steps = [(a, at, size) for a, size, at in self.areas]
        self.spans: list[Span] = [
            (address + i, min(BLOCK_BYTES, size - i), at + i)
            for address, at, size in steps
            for i in range(0, size, BLOCK_BYTES)
        ]

    def restore(self) -> None:
        """All adopted regions as they were."""
        for address, size, at in self.areas:
            self.driver.write(address, self.contents[at : at + size])

    def replay(self, key: str) -> bytes:
        """Outputs of one seeded replay."""
        self.workload.prepare(key, self.seed)
        self.driver.launch(self.captured[key].executable, 0)
        self.driver.synchronize()
        return self.workload.observe(key)

    def survives(self, key: str, want: bytes, poisoned: Sequence[int], pattern: int) -> bool:
        """Whether outputs stay the same with these spans poisoned; a fault under poison is a no."""
        self.restore()
        for address, size in _merged([self.spans[i] for i in poisoned]):
            self.driver.fill(address, size, pattern)
        try:
            return self.replay(key) == want
        except GraphError:
            return False


def _merged(spans: Sequence[Span]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for address, size, _ in spans:
        if out and sum(out[-1]) == address:
            out[-1] = (out[-1][0], out[-1][1] + size)
        else:
            out.append((address, size))
    return out


def needed_spans(bench: Bench, fixed: set[int]) -> set[int]:
    """Numbers of the spans that some graph needs; `fixed` ones are needed without trial."""
    needed = set(fixed)
    for key in bench.captured:
        bench.restore()
        want = bench.replay(key)
        for pattern in PATTERNS:
            candidates = [i for i in range(len(bench.spans)) if i not in needed]
            needed |= _search(candidates, partial(_survives, bench, key, want, pattern))
    bench.restore()
    return needed


def _survives(bench: Bench, key: str, want: bytes, pattern: int, poisoned: Sequence[int]) -> bool:
    return bench.survives(key, want, poisoned, pattern)


def _search(candidates: list[int], survives: Callable[[Sequence[int]], bool]) -> set[int]:
    """Halve until single blocks; if the halves are needed only together, keep the whole set."""
    if not candidates or survives(candidates):
        return set()
    if len(candidates) == 1:
        return set(candidates)
    middle = len(candidates) // 2
    found = _search(candidates[:middle], survives) | _search(candidates[middle:], survives)
    return found or set(candidates)


def minimise(
    driver: DriverApi,
    workload: Workload,
    captured: dict[str, Captured],
    combined: Combined,
    live: dict[int, bytes],
) -> Tables:
    """The tables with only the needed blocks; `live` are this process's bytes by base address."""
    tables = combined.tables
    base = {r.symbol: r.base for r in combined.adopted}
    blocks = [
        (base[tables.regions[r].symbol], size, start, r) for r, size, _, start in tables.blocks.tolist()
    ]
    contents = b"".join(live[address][:size] for address, size, _, _ in blocks)
    captured = {key: captured[key] for key in tables.keys}
    bench = Bench(driver, workload, captured, [b[:3] for b in blocks], contents)
    starts = np.array([at for _, _, at in bench.spans], np.int64)
    fixed = np.searchsorted(starts, tables.content_relocations["place"], side="right") - 1
    needed = needed_spans(bench, set(fixed.tolist()))
    pieces = _pieces(blocks, [bench.spans[i] for i in sorted(needed)])
    return drop_unused_regions(keep_blocks(tables, pieces))


def _pieces(
    blocks: Sequence[tuple[int, int, int, int]], spans: Sequence[Span]
) -> list[tuple[int, int, int, int]]:
    """(region, length, offset, start) of each span."""
    out = []
    for _, size, at in spans:
        _, _, start, region = next(b for b in reversed(blocks) if b[2] <= at)
        out.append((region, size, at - start, at))
    return out


def keep_blocks(tables: Tables, wanted: Sequence[tuple[int, int, int, int]]) -> Tables:
    """Contents cut down to (region, length, offset, start) pieces of the present contents."""
    blocks, data, rows, at = [], [], [], 0
    places = tables.content_relocations["place"].astype(np.int64)
    for region, length, offset, start in wanted:
        blocks.append((region, length, offset, at))
        data.append(np.asarray(tables.contents[start : start + length]))
        mine: Array = tables.content_relocations[(places >= start) & (places < start + length)].copy()
        mine["place"] = mine["place"].astype(np.int64) - start + at
        rows.append(mine)
        at += length
    return replace(
        tables,
        blocks=np.array(blocks, BLOCK),
        contents=np.concatenate([np.zeros(0, np.uint8), *data]),
        content_relocations=np.concatenate([np.zeros(0, RELOCATION), *rows]),
    )
