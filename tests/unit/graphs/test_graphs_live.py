"""Contents that the engine rewrites between steps are not stored."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.graphs_engine import MOVING, STEPS
from support.graphs_processes import Launches

from coldstart.graphs import offline, tables
from coldstart.graphs.errors import GraphRefusedError, NotProvenError


@pytest.mark.slow
def test_graphs_over_memory_that_moves_are_refused_and_the_others_proven(tmp_path: Path) -> None:
    """Its contents are not stored, so the proof fails for the graphs that need them."""
    launches = Launches(**{MOVING: "semaphore"})
    found = tables.load(offline.make(tmp_path, launches))
    assert sorted(found.graphs) == ["decode:256", "decode:64"]
    assert set(found.refused) == {"decode:1", "decode:8"}
    assert all("restored outputs differ" in reason for reason in found.refused.values())
    assert launches.names.count("prove graphs") == 2 and launches.answers[-1]["failed"] == {}


@pytest.mark.slow
def test_no_bundle_is_created_when_all_graphs_need_the_memory(tmp_path: Path) -> None:
    with pytest.raises(NotProvenError, match="no graph was proven"):
        offline.make(tmp_path, Launches(**{MOVING: "table"}))


@pytest.mark.slow
@pytest.mark.parametrize("steps", ["0", "1"])
def test_engine_without_observed_steps_proves_no_graph(tmp_path: Path, steps: str) -> None:
    with pytest.raises(GraphRefusedError, match=f"{steps} live steps, but 2 are needed"):
        offline.make(tmp_path, Launches(**{STEPS: steps}))


class Memory:
    """One byte string as device memory."""

    data = bytes(1024)

    def synchronize(self) -> None:
        """Do nothing; the fake is synchronous."""

    def read(self, address: int, size: int) -> bytes:
        return self.data[address : address + size]


@given(st.lists(st.sets(st.integers(0, 1023)), min_size=2, max_size=6))
def test_any_change_at_any_step_is_seen(states: list[set[int]]) -> None:
    memory: Any = Memory()
    with TemporaryDirectory() as work:
        watch = offline.ContentWatch(memory, Path(work), [(0, 600), (600, 424)])
        for changed in states:
            memory.data = bytes(int(at in changed) for at in range(1024))
            watch.look()
        seen = json.loads((Path(work) / offline.LIVE).read_text())
    assert seen == {"steps": len(states), "changed": sorted({int(at >= 600) for at in set().union(*states)})}
