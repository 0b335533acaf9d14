"""The offline half: snapshots on disk, disagreements, conflicts, inspection."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.graphs_tools import offline

from coldstart.graphs.errors import AlteredTableError, GraphError
from coldstart.graphs.link import combine
from coldstart.graphs.record import drop_aliases, keep, load_snapshot
from coldstart.graphs.tables import SymbolRegion


def test_a_snapshot_on_disk_is_the_same_snapshot(tmp_path: Path) -> None:
    a, b = (offline(seed).snapshot for seed in (11, 12))
    a.save(tmp_path / "a")
    again = load_snapshot(tmp_path / "a")
    one, other = combine(a, b), combine(again, b)
    assert all(
        one.graphs[k].relocations.tobytes() == other.graphs[k].relocations.tobytes() for k in one.graphs
    )
    assert one.contents.tobytes() == other.contents.tobytes()
    (tmp_path / "a" / "memory.npz").write_bytes(b"")
    with pytest.raises(AlteredTableError):
        load_snapshot(tmp_path / "a")


def test_graphs_of_one_process_only_are_refused() -> None:
    a, b = (offline(seed).snapshot for seed in (11, 12))
    tables = combine(a, keep(b, ["decode:8", "decode:256"]))
    assert sorted(tables.graphs) == ["decode:256", "decode:8"]
    assert "one process only" in tables.refused["decode:1"]


def test_another_launch_size_is_another_graph() -> None:
    a, b = (offline(seed).snapshot for seed in (11, 12))
    b.tables.graphs["decode:8"].nodes["grid"][0] = 9
    tables = combine(a, b)
    assert list(tables.refused) == ["decode:8"] and "differ" in tables.refused["decode:8"]


def test_nothing_left_is_an_error() -> None:
    a = offline(11).snapshot
    with pytest.raises(GraphError, match="no graph"):
        combine(a, keep(a, ()))


def test_views_of_one_storage_are_one_region() -> None:
    views = [
        SymbolRegion("param:tied", 64, 512),
        SymbolRegion("param:embed", 64, 512),
        SymbolRegion("buffer:part", 8, 520),
    ]
    assert [r.symbol for r in drop_aliases(views)] == ["param:embed"]


def test_a_refusal_names_kernel_byte_addresses_and_memory() -> None:
    a, b = (offline(seed).snapshot for seed in (11, 12))
    nodes = b.tables.graphs["decode:8"].nodes
    at = int(nodes["payload"][0]) + 8  # the second parameter of `embed`, a weight
    payload, (kv,) = b.tables.graphs["decode:8"].payload.copy(), [r for r in b.regions if r.symbol == "kv:0"]
    payload[at : at + 8] = np.frombuffer((kv.base + 64).to_bytes(8, "little"), np.uint8)
    b.tables.graphs["decode:8"].payload = payload
    (weight,) = [r for r in a.regions if r.symbol == "param:embed"]
    tables = combine(a, b)
    assert list(tables.refused) == ["decode:8"]
    assert tables.refused["decode:8"] == (
        "fw_embed, parameter byte 8: a word points into live memory, but to different places in the two captures: "
        f"{weight.base:#x} (param:embed+0) and {kv.base + 64:#x} (kv:0+64)"
    )
