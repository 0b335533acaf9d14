"""The offline half: three classifiers in one report, contents, inspection, snapshots on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.graphs_tools import bundle, offline

from benchmarks.gpu.compare import compare
from coldstart.graphs import overview as inspection
from coldstart.graphs.combine import combine
from coldstart.graphs.errors import AlteredTableError
from coldstart.graphs.snapshot import load_snapshot


def test_the_three_classifiers_on_one_model() -> None:
    a, b = (offline(seed).snapshot for seed in (11, 12))
    scores = {s.classifier: s for s in compare(a, b)}
    assert scores["differential"].corrupted == scores["differential"].missed == 0
    assert scores["prefix"].corrupted > 0
    assert scores["single"].missed > 0


def test_a_snapshot_on_disk_is_the_same_snapshot(tmp_path: Path) -> None:
    a, b = (offline(seed).snapshot for seed in (11, 12))
    a.save(tmp_path / "a")
    again = load_snapshot(tmp_path / "a")
    one, other = combine(a, b).tables, combine(again, b).tables
    assert one.relocations.tobytes() == other.relocations.tobytes()
    (tmp_path / "a" / "trace.npy").write_bytes(b"")
    with pytest.raises(AlteredTableError):
        load_snapshot(tmp_path / "a")


def test_inspection_and_difference(bundle_directory: Path, tmp_path: Path) -> None:
    seen = inspection.summary(bundle_directory)
    assert seen["graphs"] == 4 and seen["proof"]["graphs"] == 4 and seen["edges_with_data"] > 0
    assert set(seen["relocations_by_region"]) == {"alloc", "kv", "lib", "param", "pool", "static"}
    assert sum(seen["relocations_by_region"].values()) == seen["relocations"]
    assert seen["nodes_by_kind"]["memset"] == seen["nodes_by_kind"]["memcpy"] == 4
    bundle(tmp_path / "other", seeds=(2, 6, 1, 5))
    same = inspection.diff(bundle_directory, tmp_path / "other")
    assert same["graphs_changed"] == {} and same["kernels_only"] == [[], []]


def test_a_refusal_names_kernel_byte_addresses_and_memory() -> None:
    a, b = (offline(seed).snapshot for seed in (11, 12))
    index = a.tables.keys.index("decode:8")
    nodes, _, _ = a.tables.graph(index)
    at = int(nodes["payload"][0]) + 8  # the second parameter of `embed`, a weight
    payload, (kv,) = b.tables.payload.copy(), [r for r in b.regions if r.symbol == "kv:0"]
    payload[at : at + 8] = np.frombuffer((kv.base + 64).to_bytes(8, "little"), np.uint8)
    b.tables.payload = payload
    (weight,) = [r for r in a.regions if r.symbol == "param:embed"]
    tables = combine(a, b).tables
    assert list(tables.refused) == ["decode:8"]
    assert tables.refused["decode:8"] == (
        "fw_embed, parameter byte 8: a word points into live memory, but to different places in the two captures: "
        f"{weight.base:#x} (param:embed+0) and {kv.base + 64:#x} (kv:0+64)"
    )
