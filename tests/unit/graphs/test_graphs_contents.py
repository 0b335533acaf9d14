"""Search for the memory blocks that outputs need, in a simulated memory of millions of blocks."""

from __future__ import annotations

from typing import Any

import pytest

from coldstart.graphs.api import Captured
from coldstart.graphs.contents import BLOCK_BYTES, Ranges, ReplayHarness, find_needed_blocks
from coldstart.graphs.errors import DriverError, GraphRefusedError

BASE, SIZE = 1 << 40, 2 << 30


class Memory:
    """Driver and workload whose outputs are correct unless one of the sets of blocks is completely poisoned."""

    def __init__(self, needed: list[set[int]], faults: bool = False) -> None:
        self._needed, self._faults, self.bad, self.written, self.trials = (
            needed,
            faults,
            list[tuple[int, int]](),
            0,
            0,
        )

    def fill(self, address: int, size: int, value: int) -> None:
        self.bad.append((address - BASE, address - BASE + size))

    def write(self, address: int, data: bytes) -> None:
        self.written += len(data)
        start, end = address - BASE, address - BASE + len(data)
        self.bad = [
            (a, b)
            for low, high in self.bad
            for a, b in ((low, min(high, start)), (max(low, end), high))
            if a < b
        ]

    def prepare(self, key: str, seed: int) -> None:
        self.trials += 1

    def launch(self, executable: int, stream: int) -> None: ...

    def synchronize(self) -> None: ...

    def observe(self, key: str) -> bytes:
        for blocks in self._needed:
            if all(any(low <= block * BLOCK_BYTES < high for low, high in self.bad) for block in blocks):
                if self._faults:
                    raise DriverError("cuStreamSynchronize", "ILLEGAL_ADDRESS")
                return b"wrong"
        return b"right"


class Zeros(bytes):
    """Contents of any length that use no memory."""

    def __getitem__(self, where: Any) -> Any:
        return memoryview(bytearray(0)) if where.stop == where.start else _Some(where.stop - where.start)


class _Some:
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


def bench(memory: Any, areas: list[tuple[int, int, int]]) -> ReplayHarness:
    return ReplayHarness(memory, memory, {"a": Captured(0, 1), "b": Captured(0, 2)}, areas, Zeros())


@pytest.mark.parametrize("faults", [False, True])
def test_single_blocks_are_found_among_millions(faults: bool) -> None:
    memory = Memory([{3}, {2_000_001}], faults)
    assert find_needed_blocks(bench(memory, [(BASE, SIZE, 0)]), []) == [(3, 4), (2_000_001, 2_000_002)]
    assert memory.trials < 200


def test_the_budget_ends_the_search_and_undecided_blocks_are_stored() -> None:
    memory = Memory([{3}, {2_000_001}, {777}])
    short = bench(memory, [(BASE, SIZE, 0)])
    short.budget = 20
    found = find_needed_blocks(short, [])
    assert {3, 777, 2_000_001} <= find_members(found, {3, 777, 2_000_001}) and memory.trials == 2 + 20


def find_members(ranges: Ranges, wanted: set[int]) -> set[int]:
    return {block for block in wanted if any(low <= block < high for low, high in ranges)}


class Restless(Memory):
    """Graph "a" gives other outputs at each replay."""

    def launch(self, executable: int, stream: int) -> None:
        self.executable = executable

    def observe(self, key: str) -> bytes:
        return super().observe(key) + (self.trials.to_bytes(4, "little") if self.executable == 1 else b"")


def test_a_graph_that_disagrees_with_itself_is_named() -> None:
    assert list(bench(Restless([]), [(BASE, 512, 0)]).find_unsteady()) == ["a"]


class Broken(Memory):
    """After one illegal access every later call fails, as in a CUDA context."""

    broken = False

    def observe(self, key: str) -> bytes:
        try:
            found = super().observe(key)
        except DriverError:
            self.broken = True
        if self.broken:
            raise DriverError("cuMemcpyDtoH", "ILLEGAL_ADDRESS")
        return found


def test_a_context_that_a_replay_broke_is_named() -> None:
    memory = Broken([{3}], faults=True)
    with pytest.raises(GraphRefusedError, match="a: a replay over overwritten memory broke the CUDA context"):
        find_needed_blocks(bench(memory, [(BASE, 8 * BLOCK_BYTES, 0)]), [])
    assert memory.trials < 8
