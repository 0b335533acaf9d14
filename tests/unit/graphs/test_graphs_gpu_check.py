"""A rehearsal of benchmarks/gpu on the simulator and the CPU: that its code runs, not what a GPU does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "gpu"))

import phases  # noqa: E402
import verify  # noqa: E402
import workloads  # noqa: E402
from graphs_tools import SMALL  # noqa: E402

from coldstart.graphs.api import Captured  # noqa: E402
from coldstart.graphs.sim.model import SimModel  # noqa: E402
from coldstart.graphs.table import Region  # noqa: E402

TINY = workloads.Shape(layers=2, width=64, heads=4, inner=96, vocabulary=128)


class SimGraph:
    """What a kept CUDAGraph offers."""

    def __init__(self, model: SimModel, captured: Captured) -> None:
        self._model, self.captured = model, captured

    def raw_cuda_graph(self) -> int:
        return self.captured.graph

    def replay(self) -> None:
        self._model.driver.launch(self.captured.executable, 0)


class SimProcess(phases.Process):
    """The phases' process over the simulator."""

    def __init__(self, case: str, seed: int, layers: int, *, watch: bool = False) -> None:
        self.times, self.notes = {}, {}
        self.framework = self.work = model = SimModel(SMALL, seed)
        self.driver, self._capture = model.driver, model.capture
        model.refusals = {}  # type: ignore[attr-defined]
        model.refusal = model.refusals.get  # type: ignore[attr-defined, method-assign]
        model.keys = model.sizes  # type: ignore[attr-defined]
        self.random = case == "random"

    def capture_all(self) -> Any:
        graphs = {key: SimGraph(self.work, self._capture(key)) for key in self.order()}
        return graphs, {key: graph.captured for key, graph in graphs.items()}

    def free_memory(self) -> int:
        return 0

    def latency(self, run: Any, rounds: int = 30) -> float:
        run()
        return 1.0

    def consumes_random(self, graph: Any) -> bool:
        return self.random

    def resize_a_region(self) -> None:
        self.work.named["kv:0"] = Region("kv:0", 8, self.work.named["kv:0"].base)


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "Process", SimProcess)
    real = SimModel.capture
    monkeypatch.setattr(SimGraph, "graph", property(lambda self: self.captured.graph), raising=False)
    monkeypatch.setattr(
        SimGraph, "executable", property(lambda self: self.captured.executable), raising=False
    )
    monkeypatch.setattr(SimModel, "capture", lambda self, key: SimGraph(self, real(self, key)))


def test_all_phases_on_the_simulator(sim: None, tmp_path: Path) -> None:
    results = {}
    for label, function, case, seed in verify.LLAMA[1:]:
        results[label] = getattr(phases, function)(case, tmp_path, seed, 2)
        json.dumps(results[label])
    assert results["P3"]["bundle"]["graphs"] == 4 and not results["P3"]["kernels_without_binary"]
    assert (
        results["P4.1"]["restored"]
        == results["P4.1"]["equal_captured"]
        == results["P4.1"]["equal_eager"]
        == 4
    )
    assert results["P4.gate"]["proven"] == 4
    assert results["P5.shifted"]["caught"]
    assert results["P5.missing"] == results["P5.missing"] | {
        "other_size_links": False,
        "collision_refused": True,
    }
    assert results["P5.missing"]["working_graphs_without_a_binary"] == 3


def test_random_graphs_are_refused(sim: None, tmp_path: Path) -> None:
    for seed in (1, 2):
        phases.snapshot("random", tmp_path, seed, 1)
    refused = phases.bundle("random", tmp_path, 3, 1)["refused"]
    assert set(refused.values()) == {"the graph consumes random numbers"}


def test_a_failed_phase_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(step: Any, where: Path, layers: int, limit: float) -> dict[str, Any]:
        return {"label": step[0], "ok": False, "error": "no device"}

    monkeypatch.setattr(verify, "run_step", step)
    report = verify.check(1, 1, "P1")
    assert report["conclusions"]["phases_failed"] == ["P1.1", "P1.2", "P1.3"]
    assert [s["error"] for s in verify.check(1, 0, "P2")["steps"]] == ["no time was left"] * 2


@pytest.mark.skipif(workloads.DEVICE != "cpu", reason="rehearses on the CPU")
def test_both_attention_paths_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads.Llama, "sizes", (1, 4))
    monkeypatch.setattr(workloads, "scatter", lambda seed: [])
    outputs = []
    for path in ("sdpa", "matmul"):
        model = workloads.Llama(1, TINY, path)
        model.prepare("decode:4", 3)
        model.eager("decode:4")
        outputs.append(model.static["static:out"].float())
        assert model.observe("decode:4") == model.observe("decode:4")
    assert torch.isfinite(outputs[0]).all() and outputs[0].abs().max() > 0.1
    assert torch.allclose(outputs[0], outputs[1], atol=0.15)


@pytest.mark.skipif(workloads.DEVICE != "cpu", reason="rehearses on the CPU")
def test_the_checksum_sees_one_bit() -> None:
    tensor = torch.randn(1 << 16, dtype=torch.float32)
    before = workloads.checksum(tensor)
    tensor.view(torch.int32)[777] ^= 1
    assert workloads.checksum(tensor) != before
