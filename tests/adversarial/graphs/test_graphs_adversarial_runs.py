"""Processes whose replay a simpler method would get wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.graphs_tools import SMALL, offline, seal

from coldstart.graphs import combine, gate, table_files
from coldstart.graphs.errors import BaseCollisionError, NotProvenError
from coldstart.graphs.restore import Restorer
from coldstart.graphs.tables import Tables
from tests.support.graphs.driver import SimDriver
from tests.support.graphs.model import SimModel, libraries


def _altered(bundle_directory: Path, tmp_path: Path, change: Callable[[Tables], Tables]) -> Path:
    """Change the tables of a bundle and seal it again."""
    return seal(bundle_directory, tmp_path / "naive", change(table_files.load(bundle_directory)))


def test_graphs_are_not_chains_and_their_edge_data_survive(bundle_directory: Path) -> None:
    model = SimModel(SMALL, 22)
    restorer = Restorer(bundle_directory, model.driver, model)
    restorer.link()
    for key in model.sizes():
        captured, restored = model.capture(key).graph, restorer.graph(key).keep[1]
        shapes = [_shape(model.driver, graph) for graph in (captured, restored)]
        assert shapes[0] == shapes[1]
        assert any(kind for *_, kind in shapes[0])
        assert len({s for s, *_ in shapes[0]}) < len(shapes[0])


def _shape(driver: SimDriver, graph: int) -> list[tuple[int, ...]]:
    number = {handle: i for i, handle in enumerate(driver.nodes(graph))}
    return sorted(
        (number[e.source], number[e.target], e.from_port, e.to_port, e.type) for e in driver.edges(graph)
    )


def test_a_relocation_shifted_by_256_bytes_does_not_pass_the_gate(
    bundle_directory: Path, tmp_path: Path
) -> None:
    def shift(t: Tables) -> Tables:
        rows = t.relocations.copy()
        static = [i for i, r in enumerate(t.regions) if r.symbol == "kv:0"]
        rows["offset"][np.flatnonzero(np.isin(rows["region"], static))] += 256
        return replace(t, relocations=rows)

    naive = _altered(bundle_directory, tmp_path, shift)
    model = SimModel(SMALL, 24)
    proof = gate.prove(Restorer(naive, model.driver, model), model.driver, model, model)
    assert proof.failed
    with pytest.raises(NotProvenError):
        gate.publish(proof, naive)


def test_the_canary_catches_altered_tables_that_were_sealed_again(
    bundle_directory: Path, tmp_path: Path
) -> None:
    def swap(t: Tables) -> Tables:
        rows = t.relocations.copy()
        first = t.graphs[t.keys.index("decode:1")]
        mine = np.arange(first["relocation"], first["relocation"] + first["relocations"])
        params = [i for i, r in enumerate(t.regions) if r.symbol.startswith("param:layers")]
        at = mine[np.isin(rows["region"][mine], params)]
        rows["region"][at] = np.roll(rows["region"][at], 1)
        return replace(t, relocations=rows)

    naive = _altered(bundle_directory, tmp_path, swap)
    shutil.copy(bundle_directory / gate.PROOF, naive / gate.PROOF)
    with pytest.raises(NotProvenError):
        gate.read_proof(naive)
    model = SimModel(SMALL, 25)
    restorer = Restorer(naive, model.driver, model)
    restorer.link()
    assert not gate.canary(gate.read_proof(bundle_directory), restorer, model.driver, model)


def test_two_layouts_that_do_not_differ_are_refused() -> None:
    halves = []
    for seed in (1, 2):
        driver = SimDriver(seed, libraries(), fixed_bases=True)
        halves.append(offline(seed, model=SimModel(SMALL, 1, driver=driver)))
    with pytest.raises(BaseCollisionError):
        combine.combine(halves[0].snapshot, halves[1].snapshot)
