"""Find the contents that graphs need: a 512-byte block is stored only if the output of some replay depends on it.

Weights are never candidates. All other memory that graphs own (pool segments and adopted library allocations)
is filled with a pattern before a replay. If the outputs change, the filled set is halved until single blocks
remain. Two patterns are used, because a block may equal one of them by chance. This replaces the rule of
MEDUSA, section 4.3, by a test.

The test needs graphs whose clean replays are equal; others are refused. After `budget` replays the blocks that
are not decided are stored without a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import numpy as np

from coldstart.graphs.api import Captured, DriverApi, Workload
from coldstart.graphs.builder import drop_unused_regions, subset
from coldstart.graphs.combine import Combined
from coldstart.graphs.errors import GraphError, GraphRefusedError
from coldstart.graphs.tables import BLOCK, RELOCATION, Array, Tables

BLOCK_BYTES = 512
BUDGET = 10_000
PATTERNS = (0xFF, 0x5A)
Span = tuple[int, int, int]
Ranges = list[tuple[int, int]]
"""Half-open ranges of block numbers, sorted and disjoint; ranges, because a pool can have millions of blocks."""


@dataclass
class ReplayHarness:
    """Process whose captured graphs can be replayed over chosen contents.

    `areas` are the adopted regions as (address, size, position in `contents`). Blocks are numbered
    consecutively through them.
    """

    driver: DriverApi
    workload: Workload
    captured: dict[str, Captured]
    areas: Sequence[Span]
    contents: bytes
    seed: int = 11
    budget: int = BUDGET

    def __post_init__(self) -> None:
        counts = [-(-size // BLOCK_BYTES) for _, size, _ in self.areas]
        self._first = [0, *accumulate(counts)]

    @property
    def everything(self) -> Ranges:
        """Return the range of all blocks."""
        return [(0, self._first[-1])] if self._first[-1] else []

    def spans(self, ranges: Ranges) -> Iterator[tuple[int, Span]]:
        """Yield area number and (address, bytes, position in `contents`) of each range, divided at area boundaries."""
        for low, high in ranges:
            for number, (address, size, at) in enumerate(self.areas):
                first, last = self._first[number], self._first[number + 1]
                start = (max(low, first) - first) * BLOCK_BYTES
                end = min((min(high, last) - first) * BLOCK_BYTES, size)
                if start < end:
                    yield number, (address + start, end - start, at + start)

    def blocks(self, positions: Iterable[int]) -> Ranges:
        """Return the blocks that contain these positions of `contents`."""
        numbers = set()
        for position in positions:
            number = next(i for i, (_, n, at) in enumerate(self.areas) if at <= position < at + n)
            numbers.add(self._first[number] + (position - self.areas[number][2]) // BLOCK_BYTES)
        return union([(block, block + 1) for block in numbers])

    def replay(self, key: str) -> bytes:
        """Return the outputs of one seeded replay."""
        self.workload.prepare(key, self.seed)
        self.driver.launch(self.captured[key].executable, 0)
        self.driver.synchronize()
        return self.workload.observe(key)

    def write(self, ranges: Ranges) -> None:
        """Restore the captured contents of these blocks."""
        for _, (address, size, at) in self.spans(ranges):
            self.driver.write(address, self.contents[at : at + size])

    def find_unsteady(self) -> dict[str, str]:
        """Return the graphs whose outputs differ between two replays over clean contents, with the reason."""
        reason = "two replays over the same contents differ"
        return {key: reason for key in self.captured if self.replay(key) != self.replay(key)}

    def survives(self, key: str, want: bytes, poisoned: Ranges, pattern: int) -> bool:
        """Return whether the outputs stay the same with these blocks overwritten; False if the replay fails.

        Without a replay, return False once the budget is spent. Raises GraphRefusedError if no replay works
        any more.
        """
        if self.budget <= 0:
            return False
        self.budget -= 1
        self.write(subtract(self.everything, poisoned))
        for _, (address, size, _) in self.spans(poisoned):
            self.driver.fill(address, size, pattern)
        try:
            return self.replay(key) == want
        except GraphError as error:
            self._check_context(key, error)
            return False

    def _check_context(self, key: str, failure: GraphError) -> None:
        """Raise GraphRefusedError if a replay over clean contents fails too, as after an illegal access."""
        try:
            self.write(self.everything)
            self.replay(key)
        except GraphError as error:
            raise GraphRefusedError(
                f"{key}: a replay over overwritten memory broke the CUDA context ({failure})"
            ) from error


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the ranges sorted, with touching ranges merged."""
    out: Ranges = []
    for low, high in sorted(ranges):
        if out and low <= out[-1][1]:
            out[-1] = (out[-1][0], max(high, out[-1][1]))
        else:
            out.append((low, high))
    return out


def subtract(ranges: Ranges, taken: Ranges) -> Ranges:
    """Return the parts of `ranges` that are not in `taken`."""
    out: Ranges = []
    for low, high in ranges:
        inside = [(max(s, low), min(e, high)) for s, e in taken if s < high and e > low]
        starts, ends = [low, *(e for _, e in inside)], [*(s for s, _ in inside), high]
        out += [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]
    return out


def find_needed_blocks(bench: ReplayHarness, fixed: Ranges) -> Ranges:
    """Return the blocks that any graph needs; `fixed` blocks are needed without a test."""
    # Replay before any block is overwritten; the graphs allow replays in any order.
    want = {key: bench.replay(key) for key in bench.captured}
    needed = fixed
    for key in bench.captured:
        for pattern in PATTERNS:
            candidates = subtract(bench.everything, needed)
            survives = partial(_survives, bench, key, want[key], pattern)
            needed = union([*needed, *_search(bench, candidates, survives)])
    bench.write(bench.everything)
    return needed


def _survives(bench: ReplayHarness, key: str, want: bytes, pattern: int, poisoned: Ranges) -> bool:
    return bench.survives(key, want, poisoned, pattern)


def _search(bench: ReplayHarness, candidates: Ranges, survives: Callable[[Ranges], bool]) -> Ranges:
    """Halve the candidates down to single blocks; return all of them if the halves are needed only together."""
    count = sum(high - low for low, high in candidates)
    if not count or survives(candidates):
        return []
    if count == 1 or bench.budget <= 0:
        return candidates
    left, right = _halves(candidates, count // 2)
    return _search(bench, left, survives) + _search(bench, right, survives) or candidates


def _halves(ranges: Ranges, count: int) -> tuple[Ranges, Ranges]:
    """Return the first `count` blocks and the others."""
    left: Ranges = []
    for number, (low, high) in enumerate(ranges):
        if high - low > count:
            cut = low + count
            head = [(low, cut)] if count else []
            return [*left, *head], [(cut, high), *ranges[number + 1 :]]
        left.append((low, high))
        count -= high - low
    return left, []


def minimise(
    driver: DriverApi,
    workload: Workload,
    captured: dict[str, Captured],
    combined: Combined,
    live: dict[int, bytes],
    budget: int = BUDGET,
) -> Tables:
    """Return the tables with only the needed blocks; `live` has the bytes of this process by base address.

    Graphs that are not deterministic are refused in the returned tables. Raises GraphError.
    """
    tables = combined.tables
    base = {r.symbol: r.base for r in combined.adopted}
    blocks = [
        (base[tables.regions[r].symbol], size, start, r) for r, size, _, start in tables.blocks.tolist()
    ]
    contents = b"".join(live[address][:size] for address, size, _, _ in blocks)
    captured = {key: captured[key] for key in tables.keys}
    bench = ReplayHarness(driver, workload, captured, [b[:3] for b in blocks], contents, budget=budget)
    unsteady = bench.find_unsteady()
    bench.captured = {key: graph for key, graph in captured.items() if key not in unsteady}
    needed = find_needed_blocks(bench, bench.blocks(tables.content_relocations["place"].tolist()))
    pieces = [
        (blocks[number][3], size, at - blocks[number][2], at) for number, (_, size, at) in bench.spans(needed)
    ]
    kept = keep_blocks(tables, pieces)
    return drop_unused_regions(subset(kept, lambda key: key not in unsteady, unsteady) if unsteady else kept)


def keep_blocks(tables: Tables, wanted: Sequence[tuple[int, int, int, int]]) -> Tables:
    """Reduce the contents to (region, length, offset, start) pieces; `start` is a position in the current contents."""
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
