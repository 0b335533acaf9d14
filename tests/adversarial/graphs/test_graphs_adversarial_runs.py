"""Processes whose replay is wrong with a naive method; each case has a companion test."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.graphs_tools import SMALL, is_wrong, offline, seal

from coldstart.graphs import combine, contents, gate, table_files
from coldstart.graphs.errors import BaseCollisionError, NotProvenError
from coldstart.graphs.restore import Restorer
from coldstart.graphs.tables import TENSOR_MAP, Tables
from tests.support.graphs.driver import SimDriver
from tests.support.graphs.model import SimModel, libraries


def _altered(bundle_directory: Path, tmp_path: Path, change: Callable[[Tables], Tables]) -> Path:
    """Change the tables of a bundle and seal it again, as a naive implementation would write it."""
    return seal(bundle_directory, tmp_path / "naive", change(table_files.load(bundle_directory)))


@pytest.mark.parametrize("key", list(SimModel(SMALL, 0).sizes()))
def test_the_bundle_itself_is_right(bundle_directory: Path, key: str) -> None:
    assert not is_wrong(bundle_directory, key)


def test_split_k_semaphores_are_among_the_contents(bundle_directory: Path) -> None:
    tables = table_files.load(bundle_directory)
    held = {tables.regions[b["region"]].symbol for b in tables.blocks}
    assert any(symbol.startswith("lib:") for symbol in held)
    assert tables.contents.nbytes <= 8 * contents.BLOCK_BYTES  # semaphore, pointer array, unnamed table


def test_naive_without_contents_the_semaphore_is_never_ready(bundle_directory: Path, tmp_path: Path) -> None:
    def drop(t: Tables) -> Tables:
        return replace(
            t, blocks=t.blocks[:0], contents=t.contents[:0], content_relocations=t.content_relocations[:0]
        )

    assert is_wrong(_altered(bundle_directory, tmp_path, drop), "decode:1")


def test_naive_verbatim_contents_hold_addresses_of_another_process(
    bundle_directory: Path, tmp_path: Path
) -> None:
    assert len(table_files.load(bundle_directory).content_relocations) == 2
    naive = _altered(
        bundle_directory, tmp_path, lambda t: replace(t, content_relocations=t.content_relocations[:0])
    )
    assert is_wrong(naive, "decode:256")


def test_naive_without_edges_a_parallel_order_is_wrong(bundle_directory: Path, tmp_path: Path) -> None:
    def drop(t: Tables) -> Tables:
        graphs = t.graphs.copy()
        graphs["edge"] = graphs["edges"] = 0
        return replace(t, graphs=graphs, edges=t.edges[:0])

    assert is_wrong(_altered(bundle_directory, tmp_path, drop), "decode:256")


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


def test_naive_plain_edges_lose_the_programmatic_ones(bundle_directory: Path, tmp_path: Path) -> None:
    def drop(t: Tables) -> Tables:
        edges = t.edges.copy()
        edges["type"] = edges["from_port"] = 0
        return replace(t, edges=edges)

    model = SimModel(SMALL, 23)
    restorer = Restorer(_altered(bundle_directory, tmp_path, drop), model.driver, model)
    restorer.link()
    graph = restorer.graph("decode:1").keep[1]
    assert _shape(model.driver, graph) != _shape(model.driver, model.capture("decode:1").graph)


def test_tensor_maps_are_moved_by_the_driver(bundle_directory: Path) -> None:
    assert (table_files.load(bundle_directory).relocations["kind"] == TENSOR_MAP).any()


def test_naive_plain_words_leave_tensor_maps_where_they_were(bundle_directory: Path, tmp_path: Path) -> None:
    def drop(t: Tables) -> Tables:
        keep = t.relocations["kind"] != TENSOR_MAP
        graph = np.repeat(np.arange(len(t.graphs)), t.graphs["relocations"])[keep]
        graphs = t.graphs.copy()
        graphs["relocations"] = np.bincount(graph, minlength=len(graphs))
        graphs["relocation"] = np.concatenate([[0], np.cumsum(graphs["relocations"])[:-1]])
        return replace(t, graphs=graphs, relocations=t.relocations[keep])

    assert is_wrong(_altered(bundle_directory, tmp_path, drop), "decode:64")


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
