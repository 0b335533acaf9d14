"""Graphs over unnamed memory that the engine rewrites between steps are refused, although their proofs succeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.graphs_engine import MOVING, STEPS
from support.graphs_processes import Launches

from coldstart.graphs import live, offline, table_files
from coldstart.graphs.errors import GraphRefusedError


@pytest.mark.slow
def test_graphs_over_a_buffer_that_moves_are_refused_and_the_others_proven(tmp_path: Path) -> None:
    launches = Launches(**{MOVING: "lib:1"})
    tables = table_files.load(offline.make(tmp_path, launches))
    assert sorted(tables.keys) == ["decode:256", "decode:64"]
    assert set(tables.refused) == {"decode:1", "decode:8"}
    assert all("lib:1: unnamed memory whose contents change" in why for why in tables.refused.values())
    assert launches.answers[-1]["failed"] == {}


@pytest.mark.slow
def test_no_bundle_is_created_when_all_graphs_need_the_buffer(tmp_path: Path) -> None:
    with pytest.raises(GraphRefusedError, match=r"alloc#18: unnamed memory"):
        offline.make(tmp_path, Launches(**{MOVING: "alloc#18"}))


@pytest.mark.slow
@pytest.mark.parametrize("steps", ["0", "1"])
def test_engine_without_observed_steps_proves_no_graph(tmp_path: Path, steps: str) -> None:
    with pytest.raises(GraphRefusedError, match=f"{steps} live steps, but 2 are needed"):
        offline.make(tmp_path, Launches(**{STEPS: steps}))


class Memory:
    """One byte string as device memory."""

    def __init__(self) -> None:
        self.data = b""

    def synchronize(self) -> None:
        """Do nothing; the fake is synchronous."""

    def read(self, address: int, size: int) -> bytes:
        return self.data[address : address + size]


@given(st.lists(st.binary(min_size=8, max_size=8), min_size=2, max_size=6))
def test_any_change_between_any_two_steps_is_seen(states: list[bytes]) -> None:
    memory: Any = Memory()
    watch = live.ContentWatch(memory, [("lib:0", 0, 4), ("alloc#7", 4, 4)])
    for memory.data in states:
        watch.look()
    halves = {"lib:0": [s[:4] for s in states], "alloc#7": [s[4:] for s in states]}
    assert watch.changed == {symbol for symbol, held in halves.items() if len(set(held)) > 1}
