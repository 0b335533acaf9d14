"""Every driver call of a restore fails in turn: a working graph or a clear refusal, never a wrong output."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from support.graphs_tools import SMALL, linked, outputs, restored

from coldstart.graphs.cuda.driver import CudaDriver
from coldstart.graphs.errors import DriverError
from coldstart.graphs.prove import read_proof, restore_proven
from coldstart.graphs.restore import Restorer
from tests.support.graphs.model import SimModel

METHODS = {name for name, _ in inspect.getmembers(CudaDriver, inspect.isfunction) if not name.startswith("_")}


class Faulty:
    """Driver whose call number `at` fails, and with `more` all later calls."""

    def __init__(self, driver: Any, at: int, more: bool) -> None:
        self._driver, self._at, self._more, self.count = driver, at, more, 0

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._driver, name)
        if name not in METHODS:
            return target

        def call(*arguments: Any) -> Any:
            self.count += 1
            if self.count == self._at or (self._more and self.count > self._at > 0):
                raise DriverError(name, "injected")
            return target(*arguments)

        return call


def _restore(directory: Path, at: int, more: bool) -> tuple[SimModel, Faulty, dict[str, Any]]:
    model = SimModel(SMALL, 31)
    driver = Faulty(model.driver, at, more)
    restorer = Restorer(directory, driver, model)  # type: ignore[arg-type]
    restorer.link()
    return model, driver, {key: restorer.restore(key) for key in ("decode:1", "decode:256")}


@pytest.fixture(scope="module")
def want() -> dict[str, bytes]:
    model = SimModel(SMALL, 31)
    return {key: outputs(model, model.capture(key).executable, key) for key in ("decode:1", "decode:256")}


@pytest.mark.slow
@pytest.mark.parametrize("more", [False, True])
def test_restore_works_or_is_refused_when_any_call_fails(
    bundle_directory: Path, want: dict[str, bytes], more: bool
) -> None:
    count = _restore(bundle_directory, 0, False)[1].count
    assert count > 30
    refused = 0
    for at in range(1, count + 1):
        model, _, graphs = _restore(bundle_directory, at, more)
        for key, graph in graphs.items():
            refused += graph is None
            assert graph is None or outputs(model, graph.executable, key) == want[key]
    assert refused > 0


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
    assert not restore_proven(restorer, read_proof(bundle_directory), model)
    assert "injected" in restorer.fallbacks["*"]
    assert len(model.driver.memory._bases) == before and not model.reserved
