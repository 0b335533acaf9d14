"""Processes whose replay a simpler method would get wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.graphs_tools import SMALL, is_wrong, linked, offline, restored, seal

from coldstart.graphs import tables as stored
from coldstart.graphs.errors import BaseCollisionError, NotProvenError
from coldstart.graphs.link import combine
from coldstart.graphs.prove import prove, read_proof, write
from coldstart.graphs.restore import Restorer
from coldstart.graphs.tables import TENSOR_MAP, Graph, Tables
from tests.support.graphs.driver import SimDriver
from tests.support.graphs.model import SimModel, libraries


@pytest.mark.parametrize("key", list(SimModel(SMALL, 0).sizes()))
def test_the_bundle_itself_is_right(bundle_directory: Path, key: str) -> None:
    assert not is_wrong(bundle_directory, key)


def test_contents_are_what_outlives_the_capture(bundle_directory: Path) -> None:
    tables = stored.load(bundle_directory)
    held = {tables.regions[row["region"]].symbol for row in tables.blocks}
    assert held == {"pool:0", "lib:0", "lib:1", "alloc:2048.2"}
    pool = next(i for i, r in enumerate(tables.regions) if r.symbol == "pool:0")
    # Two buffers and the array of their addresses, which no kernel writes; not the activations between them.
    assert sorted(tables.blocks["length"][tables.blocks["region"] == pool].tolist()) == [16, 1024, 1024]
    assert len(tables.content_relocations) == 2


def test_graphs_are_not_chains_and_their_edge_data_survive(bundle_directory: Path) -> None:
    model = SimModel(SMALL, 22)
    restorer = linked(bundle_directory, model)
    for key in model.sizes():
        captured, built = model.capture(key).graph, restored(restorer, key).keep[1]
        shapes = [_shape(model.driver, graph) for graph in (captured, built)]
        assert shapes[0] == shapes[1]
        assert any(kind for *_, kind in shapes[0])
        assert len({s for s, *_ in shapes[0]}) < len(shapes[0])


def _shape(driver: SimDriver, graph: int) -> list[tuple[int, ...]]:
    number = {handle: i for i, handle in enumerate(driver.nodes(graph))}
    return sorted(
        (number[e.source], number[e.target], e.from_port, e.to_port, e.type) for e in driver.edges(graph)
    )


def test_tensor_maps_are_moved_by_the_driver(bundle_directory: Path) -> None:
    graphs = stored.load(bundle_directory).graphs.values()
    assert any((graph.relocations["kind"] == TENSOR_MAP).any() for graph in graphs)


def _altered(bundle: Path, tmp_path: Path, change: Callable[[Tables, Graph], Graph]) -> Path:
    """Change the graphs of a bundle and seal it again."""
    tables = stored.load(bundle)
    graphs = {key: change(tables, graph) for key, graph in tables.graphs.items()}
    return seal(bundle, tmp_path / "naive", replace(tables, graphs=graphs))


def _shift(tables: Tables, graph: Graph) -> Graph:
    rows = graph.relocations.copy()
    kv = [i for i, r in enumerate(tables.regions) if r.symbol == "kv:0"]
    rows["offset"][np.isin(rows["region"], kv)] += 256
    return replace(graph, relocations=rows)


def _swap(tables: Tables, graph: Graph) -> Graph:
    rows = graph.relocations.copy()
    params = np.isin(
        rows["region"], [i for i, r in enumerate(tables.regions) if r.symbol.startswith("param:layers")]
    )
    rows["region"][params] = np.roll(rows["region"][params], 1)
    return replace(graph, relocations=rows)


def _freeze(tables: Tables, graph: Graph) -> Graph:
    """Take the address of the second process for a constant, as a comparison of one process would."""
    rows = graph.relocations
    payload = graph.payload.copy()
    address = tables.regions[rows["region"][0]].base + int(rows["offset"][0])
    payload[rows["place"][0] :][:8] = np.frombuffer(address.to_bytes(8, "little"), np.uint8)
    return replace(graph, relocations=rows[1:], payload=payload)


@pytest.mark.parametrize("change", [_shift, _swap, _freeze])
def test_altered_tables_that_were_sealed_again_are_not_proven(
    bundle_directory: Path, tmp_path: Path, change: Callable[[Tables, Graph], Graph]
) -> None:
    naive = _altered(bundle_directory, tmp_path, change)
    model = SimModel(SMALL, 24)
    proof = prove(Restorer(naive, model.driver, model), model)
    assert proof.failed
    write(proof, naive)
    with pytest.raises(NotProvenError, match="is not valid"):
        read_proof(naive)


def test_two_layouts_that_do_not_differ_are_refused() -> None:
    halves = []
    for seed in (1, 2):
        driver = SimDriver(seed, libraries(), fixed_bases=True)
        halves.append(offline(seed, model=SimModel(SMALL, 1, driver=driver)))
    with pytest.raises(BaseCollisionError):
        combine(halves[0].snapshot, halves[1].snapshot)
