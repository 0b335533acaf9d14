"""Restore in a process that never ran the model: same bytes, right order, fall-back graph by graph."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.graphs_tools import SMALL, bundle, outputs

from coldstart.graphs import gate
from coldstart.graphs.api import Captured
from coldstart.graphs.errors import DriverError, GraphRefusedError, NotProvenError
from coldstart.graphs.restore import Restorer
from tests.support.graphs.model import SimModel


def _restorer(directory: Path, seed: int = 4) -> tuple[SimModel, Restorer]:
    model = SimModel(SMALL, seed)
    return model, Restorer(directory, model.driver, model)


def test_restored_outputs_are_the_captured_ones_without_a_forward(bundle_directory: Path) -> None:
    model, restorer = _restorer(bundle_directory)
    assert restorer.link()
    graphs = {key: restorer.graph(key) for key in model.sizes()}
    assert model.driver.launches == 0 and restorer.fallbacks == {}
    for key, graph in graphs.items():
        assert graph.restored
        assert outputs(model, graph.executable, key) == outputs(model, model.capture(key).executable, key)


def test_smallest_and_largest_first_then_the_background(bundle_directory: Path) -> None:
    seen: list[str] = []
    model = SimModel(SMALL, 5)
    restorer = Restorer(bundle_directory, model.driver, model, note=lambda name, *_: seen.append(name))
    restorer.link()
    assert restorer.list_first() == ["decode:1", "decode:256"]
    assert restorer.list_first(8) == ["decode:1", "decode:8", "decode:256"]
    assert restorer.list_first(500) == ["decode:1", "decode:8", "decode:64", "decode:256"]
    for key in restorer.list_first():
        restorer.graph(key)
    built: list[str] = []
    restorer.start(["decode:8", "decode:64"], lambda key, graph: built.append(key))
    restorer.wait()
    assert seen == ["graphs: link", "graphs: decode:1", "graphs: decode:256"] and built == [
        "decode:64",
        "decode:8",
    ]
    assert all(restorer.graph(key).restored for key in model.sizes())


def test_a_graph_without_its_kernel_is_captured_and_the_others_are_restored(
    bundle_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, restorer = _restorer(bundle_directory)
    real = model.driver.library_kernel

    def hide(library: int, name: str) -> int:
        if name == "blas_gemm_split":
            raise DriverError("cuLibraryGetKernel", "NOT_FOUND")
        return real(library, name)

    monkeypatch.setattr(model.driver, "library_kernel", hide)
    monkeypatch.setattr(model, "trigger", lambda: None)
    assert restorer.link()
    assert not restorer.graph("decode:1").restored
    assert "blas_gemm_split" in restorer.fallbacks["decode:1"]
    assert restorer.graph("decode:256").restored


def test_another_region_size_means_capture(bundle_directory: Path) -> None:
    model, restorer = _restorer(bundle_directory)
    region = model.named["kv:0"]
    model.named["kv:0"] = type(region)(region.symbol, region.size // 2, region.base)
    assert not restorer.link()
    assert "kv:0" in restorer.fallbacks["*"]
    assert not restorer.graph("decode:1").restored


def test_neither_restored_nor_captured_is_a_clear_refusal(
    bundle_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, restorer = _restorer(bundle_directory)

    def broken(key: str) -> None:
        raise DriverError("cuStreamBeginCapture", "UNKNOWN")

    monkeypatch.setattr(model, "capture", broken)
    with pytest.raises(GraphRefusedError, match=r"neither restored .* nor captured"):
        restorer.graph("decode:1")


def test_unproven_bundle_is_neither_published_nor_restored(tmp_path: Path) -> None:
    bundle(tmp_path / "b")
    with pytest.raises(NotProvenError):
        gate.read_proof(tmp_path / "b")


def test_unnamed_memory_that_was_never_allocated_here(
    bundle_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph is captured without adoption; with adoption the bundle provides the memory."""
    model, plain = _restorer(bundle_directory)
    monkeypatch.setattr(model, "trace", list)
    assert not plain.link() and "alloc#" in plain.fallbacks["*"]
    adopting = Restorer(bundle_directory, model.driver, model, adopt=True)
    assert adopting.link()
    graph = adopting.graph("decode:64")
    assert graph.restored
    assert outputs(model, graph.executable, "decode:64") == outputs(
        model, model.capture("decode:64").executable, "decode:64"
    )


def test_a_graph_that_cannot_be_captured_fails_alone(bundle_directory: Path) -> None:
    class Refusing(SimModel):
        def capture(self, key: str) -> Captured:
            if key == "decode:8":
                raise GraphRefusedError("no memory")
            return super().capture(key)

    model = Refusing(SMALL, 61)
    proof = gate.prove(Restorer(bundle_directory, model.driver, model), model.driver, model, model)
    assert proof.failed == {"decode:8": "no memory"} and len(proof.proven) == len(SMALL.sizes) - 1
