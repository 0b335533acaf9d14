"""Restore in a process that never ran the model: same bytes, right order, a reason for each graph that is captured."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path

import pytest
from support.graphs_tools import SMALL, bundle, linked, outputs, restored, seal

from coldstart.graphs import prove as gate
from coldstart.graphs import tables as stored
from coldstart.graphs.api import Captured
from coldstart.graphs.errors import DriverError, GraphRefusedError, NotProvenError
from coldstart.graphs.restore import Restorer
from tests.support.graphs.model import SimModel


def _proof(directory: Path, model: SimModel) -> gate.Proof:
    return gate.prove(Restorer(directory, model.driver, model), model)


def test_restored_outputs_are_the_captured_ones_without_a_forward(bundle_directory: Path) -> None:
    model = SimModel(SMALL, 4)
    restorer = linked(bundle_directory, model)
    graphs = {key: restored(restorer, key) for key in model.sizes()}
    assert model.driver.launches == 0 and restorer.fallbacks == {}
    for key, graph in graphs.items():
        assert outputs(model, graph.executable, key) == outputs(model, model.capture(key).executable, key)


def test_replay_launches_on_the_stream_of_the_moment(
    bundle_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, streams = SimModel(SMALL, 4), list[int]()
    graph = restored(linked(bundle_directory, model), "decode:1")
    monkeypatch.setattr(model.driver, "launch", lambda executable, stream: streams.append(stream))
    for stream in (0, 7):
        monkeypatch.setattr(model, "stream", lambda s=stream: s)
        graph.replay()
    assert streams == [0, 7]


def test_a_graph_without_its_kernel_has_a_reason_and_the_others_are_restored(
    bundle_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SimModel(SMALL, 4)
    real = model.driver.library_kernel

    def hide(library: int, name: str) -> int:
        if name == "blas_gemm_split":
            raise DriverError("cuLibraryGetKernel", "NOT_FOUND")
        return real(library, name)

    monkeypatch.setattr(model.driver, "library_kernel", hide)
    restorer = linked(bundle_directory, model)
    assert restorer.restore("decode:1") is None and "blas_gemm_split" in restorer.fallbacks["decode:1"]
    assert restored(restorer, "decode:256")


def test_a_region_of_another_size_prevents_the_restore(bundle_directory: Path) -> None:
    model = SimModel(SMALL, 4)
    region = model.named["kv:0"]
    model.named["kv:0"] = type(region)(region.symbol, region.size // 2, region.base)
    restorer = Restorer(bundle_directory, model.driver, model)
    assert not restorer.link() and "kv:0" in restorer.fallbacks["*"]
    assert restorer.restore("decode:1") is None and not model.reserved


def test_a_graph_that_the_bundle_lacks_has_a_reason(bundle_directory: Path) -> None:
    restorer = linked(bundle_directory, SimModel(SMALL, 41))
    assert restorer.restore("decode:3") is None and "does not contain" in restorer.fallbacks["decode:3"]


def test_memory_that_a_capture_would_have_written_is_nan_where_nothing_is_stored(
    bundle_directory: Path,
) -> None:
    model = SimModel(SMALL, 42)
    assert linked(bundle_directory, model)
    tables = stored.load(bundle_directory)
    number = next(i for i, r in enumerate(tables.regions) if r.symbol == "pool:0")
    provided = [r for r in tables.regions if r.is_provided]
    pool, base = tables.regions[number], model.reserved[provided.index(tables.regions[number])]
    blocks = [(offset, length) for region, length, offset, _ in tables.blocks.tolist() if region == number]
    held = bytearray(model.driver.read(base, pool.size))
    for offset, length in blocks:
        held[offset : offset + length] = b"\xff" * length
    assert blocks and set(held) == {0xFF}


def test_unproven_bundle_is_neither_published_nor_restored(tmp_path: Path) -> None:
    bundle(tmp_path / "b")
    with pytest.raises(NotProvenError):
        gate.read_proof(tmp_path / "b")


def test_a_proof_is_of_its_tables_only(bundle_directory: Path, tmp_path: Path) -> None:
    tables = stored.load(bundle_directory)
    tables.report["pointers"] = 0
    seal(bundle_directory, tmp_path / "b", tables)
    shutil.copy(bundle_directory / gate.PROOF, tmp_path / "b" / gate.PROOF)
    with pytest.raises(NotProvenError):
        gate.read_proof(tmp_path / "b")


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


def test_the_proof_keeps_the_graphs_that_it_captures(bundle_directory: Path) -> None:
    proof = _proof(bundle_directory, OnePool(SMALL, 61))
    assert len(proof.proven) == len(SMALL.sizes) and not proof.failed


def test_a_graph_that_cannot_be_captured_fails_alone(bundle_directory: Path) -> None:
    class Refusing(SimModel):
        def capture(self, key: str) -> Captured:
            if key == "decode:8":
                raise GraphRefusedError("no memory")
            return super().capture(key)

    proof = _proof(bundle_directory, Refusing(SMALL, 61))
    assert proof.failed == {"decode:8": "no memory"} and len(proof.proven) == len(SMALL.sizes) - 1


def test_a_graph_whose_outputs_differ_between_two_replays_is_not_proven(bundle_directory: Path) -> None:
    class Restless(SimModel):
        replays = 0

        def observe(self, key: str) -> bytes:
            self.replays += key == "decode:64"
            return super().observe(key) + bytes([self.replays if key == "decode:64" else 0])

    proof = _proof(bundle_directory, Restless(SMALL, 61))
    assert list(proof.failed) == ["decode:64"] and "two replays" in proof.failed["decode:64"]


def test_a_graph_that_consumes_random_numbers_is_not_proven(bundle_directory: Path) -> None:
    """It is replayed on its own inputs: with those of another size, attention reads outside its memory."""

    class Drawing(SimModel):
        prepared = ""

        def prepare(self, key: str, seed: int) -> None:
            self.prepared = key
            super().prepare(key, seed)

        def consumes_random(self, captured: Captured) -> bool:
            return self.prepared == "decode:8"

    proof = _proof(bundle_directory, Drawing(SMALL, 61))
    assert proof.failed == {"decode:8": "the graph consumes random numbers"}


def test_a_failure_is_recorded_and_the_graph_can_be_restored_later(
    bundle_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SimModel(SMALL, 32)
    restorer = linked(bundle_directory, model)

    def broken(graph: int) -> int:
        raise DriverError("cuGraphInstantiate", "injected")

    with monkeypatch.context() as patch:
        patch.setattr(model.driver, "instantiate", broken)
        assert [restorer.restore(key) for key in ("decode:8", "decode:64")] == [None, None]
    assert set(restorer.fallbacks) == {"decode:8", "decode:64"}
    assert restored(restorer, "decode:8")


def test_a_failed_link_gives_its_memory_back(bundle_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimModel(SMALL, 33)
    before = len(model.driver.memory._bases)

    def broken(address: int, data: bytes) -> None:
        raise DriverError("cuMemcpyHtoD", "injected")

    monkeypatch.setattr(model.driver, "write", broken)
    restorer = Restorer(bundle_directory, model.driver, model)
    assert not restorer.restore_all()
    assert "injected" in restorer.fallbacks["*"]
    assert len(model.driver.memory._bases) == before and not model.reserved
