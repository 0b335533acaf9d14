"""Restore in a process that never ran the model: same bytes, right order, a reason for each graph that is captured."""

import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.graphs_tools import SMALL, bundle, linked, outputs, restored, seal

from coldstart.graphs import prove as gate
from coldstart.graphs import tables as stored
from coldstart.graphs.api import Captured
from coldstart.graphs.errors import GraphRefusedError, NotProvenError
from coldstart.graphs.restore import Restorer
from coldstart.graphs.tables import Graph, Tables
from tests.support.graphs.model import SimModel


def _proof(directory: Path, model: SimModel) -> gate.Proof:
    return gate.prove(Restorer(directory, model.driver, model), model)


def _structure(model: SimModel, graph: int) -> tuple[list[object], list[tuple[int, ...]]]:
    """Return the nodes without their parameters, and the edges with their data."""
    driver, nodes = model.driver, model.driver.nodes(graph)
    held = [driver.kernel_node(n) if driver.kind(n) == 0 else None for n in nodes]
    launches = [one and (driver.kernel(one.function), replace(one, function=0, payload=b"")) for one in held]
    edges = ((nodes.index(a), nodes.index(b), *data) for a, b, *data in driver.edges(graph))
    return launches, sorted(edges)


def test_restored_graphs_need_no_forward(bundle_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimModel(SMALL, 4)
    restorer = linked(bundle_directory, model)
    with monkeypatch.context() as patch:
        patch.setattr(model.driver, "launch", lambda *_: pytest.fail("launched"))
        graphs = {key: restored(restorer, key) for key in model.sizes}
    assert restorer.fallbacks == {}
    for key, graph in graphs.items():
        captured = model.capture(key)
        assert outputs(model, graph.executable, key) == outputs(model, captured.executable, key)
        structure = _structure(model, graph.keep[-1])
        assert structure == _structure(model, captured.graph)
        edges = structure[1]  # not a chain, and with programmatic edges
        assert len({edge[0] for edge in edges}) < len(edges) and any(edge[4] for edge in edges)


def test_contents_are_what_outlives_the_capture_and_other_memory_of_it_is_nan(bundle_directory: Path) -> None:
    model, tables = SimModel(SMALL, 42), stored.load(bundle_directory)
    assert linked(bundle_directory, model) and len(tables.content_relocations) == 2
    held = {tables.regions[row["region"]].symbol for row in tables.blocks}
    assert held == {"pool:0", "lib:0", "lib:1", "alloc:512.1"}
    provided = [r for r in tables.regions if r.is_provided]
    pool = next(r for r in tables.regions if r.symbol == "pool:0")
    blocks = [(at, size) for n, size, at, _ in tables.blocks.tolist() if tables.regions[n] is pool]
    # Two buffers and the array of their addresses; not the activations behind them.
    assert sorted(size for _, size in blocks) == [16, 1024, 1024]
    memory = bytearray(model.driver.read(model.reserved[provided.index(pool)], pool.size))
    for at, size in blocks:
        memory[at : at + size] = b"\xff" * size
    assert set(memory) == {0xFF}


def test_a_region_of_another_size_prevents_the_restore(bundle_directory: Path) -> None:
    model = SimModel(SMALL, 4)
    model.named["kv:0"] = replace(model.named["kv:0"], size=512)
    restorer = Restorer(bundle_directory, model.driver, model)
    assert restorer.restore_all() == {} and "kv:0" in restorer.fallbacks["*"]
    assert not model.reserved


@pytest.mark.slow
def test_every_driver_call_fails_in_turn_and_no_graph_is_wrong(bundle_directory: Path) -> None:
    model = SimModel(SMALL, 44)
    want = {key: outputs(model, model.capture(key).executable, key) for key in model.sizes}
    found, fail_at = set[bool](), model.fake.fake_fail_at

    def restore(more: int = 0) -> dict[str, gate.Replayable]:
        restorer = Restorer(bundle_directory, model.driver, model)
        graphs = restorer.restore_all()
        # A failed link gives its memory back, unless the next call fails, too.
        assert "*" not in restorer.fallbacks or more or not model.reserved
        return graphs

    before = model.fake.fake_calls()
    restore()
    calls = model.fake.fake_calls() - before
    for number in range(1, calls + 1):
        for more in (0, 1):
            model.release()
            fail_at(number, more)
            try:
                graphs = restore(more)
            finally:
                fail_at(-1, 0)
            found |= {key in graphs for key in want}
            assert all(outputs(model, graph.executable, key) == want[key] for key, graph in graphs.items())
    assert calls > 100 and found == {True, False}


# --- the proof ---


def _swap(tables: Tables, graph: Graph) -> Graph:
    rows = graph.relocations.copy()
    params = [i for i, r in enumerate(tables.regions) if r.symbol.startswith("param:")]
    params = np.isin(rows["region"], params)
    rows["region"][params] = np.roll(rows["region"][params], 1)
    return replace(graph, relocations=rows)


def _freeze(tables: Tables, graph: Graph) -> Graph:
    """Take the address of the second process for a constant, as a comparison of one process would."""
    rows, payload = graph.relocations, graph.payload.copy()
    address = tables.regions[rows["region"][0]].base + int(rows["offset"][0]) + 1
    payload[rows["place"][0] :][:8] = np.frombuffer(address.to_bytes(8, "little"), np.uint8)
    return replace(graph, relocations=rows[1:], payload=payload)


@pytest.mark.parametrize("change", [_swap, _freeze])
def test_altered_tables_that_were_sealed_again_are_not_proven(
    bundle_directory: Path, tmp_path: Path, change: Callable[[Tables, Graph], Graph]
) -> None:
    tables = stored.load(bundle_directory)
    graphs = {key: change(tables, graph) for key, graph in tables.graphs.items()}
    altered = seal(bundle_directory, tmp_path / "altered", replace(tables, graphs=graphs))
    proof = _proof(altered, SimModel(SMALL, 24))
    assert proof.failed
    gate.write(proof, altered)
    with pytest.raises(NotProvenError, match="invalid verification result"):
        gate.read_proof(altered)


def test_a_proof_is_of_its_tables_only(bundle_directory: Path, tmp_path: Path) -> None:
    bundle(tmp_path / "unproven")
    tables = stored.load(bundle_directory)
    tables.report["vllm"] = {}
    seal(bundle_directory, tmp_path / "other", tables)
    shutil.copy(bundle_directory / gate.PROOF, tmp_path / "other" / gate.PROOF)
    for name in ("unproven", "other"):
        with pytest.raises(NotProvenError):
            gate.read_proof(tmp_path / name)


class OnePool(SimModel):
    """As PyTorch: no capture into a pool after all graphs that used it are gone."""

    pool_used = False

    def capture(self, key: str) -> Captured:
        if self.pool_used and not any(graph() for graph in self.graphs):
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        held = type("Graph", (), {})()
        self.pool_used, self.graphs = True, [weakref.ref(held)]
        captured = super().capture(key)
        return Captured(captured.graph, captured.executable, [held])


class Refusing(SimModel):
    def capture(self, key: str) -> Captured:
        if key == "decode:8":
            raise GraphRefusedError("no memory")
        return super().capture(key)


class Restless(SimModel):
    replays = 0

    def observe(self, key: str) -> bytes:
        self.replays += key == "decode:8"
        return super().observe(key) + bytes([self.replays if key == "decode:8" else 0])


class Drawing(SimModel):
    """One graph consumes random numbers. It is replayed on its own inputs: attention reads outside those of another size."""

    prepared = ""

    def prepare(self, key: str, seed: int) -> None:
        self.prepared = key
        super().prepare(key, seed)

    def consumes_random(self, captured: Captured) -> bool:
        return self.prepared == "decode:8"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(OnePool, None), (Refusing, "no memory"), (Restless, "two replays"), (Drawing, "random numbers")],
)
def test_graph_that_cannot_be_compared_fails_alone(
    bundle_directory: Path, kind: type[SimModel], reason: str | None
) -> None:
    proof = _proof(bundle_directory, kind(SMALL, 61))
    assert list(proof.failed) == ["decode:8"] * bool(reason)
    assert len(proof.proven) + len(proof.failed) == len(SMALL.sizes)
    assert reason is None or reason in proof.failed["decode:8"]
