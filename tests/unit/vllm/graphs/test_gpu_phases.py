"""Runs the phases of benchmarks/gpu/verify.py on the simulator and the CPU; this does not test a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from support.graphs_tools import SMALL  # noqa: E402

from benchmarks.gpu import phases, verify, workloads  # noqa: E402
from coldstart.graphs.api import Captured  # noqa: E402
from coldstart.graphs.tables import SymbolRegion  # noqa: E402
from tests.support.graphs.model import SimModel  # noqa: E402

TINY = workloads.Shape(layers=2, width=64, heads=4, inner=96, vocabulary=128)


class SimGraph:
    """Fake of a CUDAGraph that retains its raw graph."""

    def __init__(self, model: SimModel, captured: Captured) -> None:
        self._model, self.captured = model, captured

    def raw_cuda_graph(self) -> int:
        return self.captured.graph

    def replay(self) -> None:
        self._model.driver.launch(self.captured.executable, 0)


class StrictModel(SimModel):
    """Raises where CUDA does: a capture that launches the first matmul of a kind, or compiles a graph's code."""

    def __init__(self, *arguments: Any) -> None:
        self.warm, self.compiled = set[str](), set[str]()
        super().__init__(*arguments)

    def call(self, name: str, *values: Any, **options: Any) -> None:
        if name.startswith("gemm"):
            if self.driver.capturing is not None and name not in self.warm:
                raise RuntimeError(f"{name}: CUBLAS_STATUS_NOT_INITIALIZED when calling cublasCreate")
            self.warm.add(name)
        super().call(name, *values, **options)

    def eager(self, key: str) -> None:
        super().eager(key)
        self.compiled.add(key)

    def capture(self, key: str) -> Captured:
        if key not in self.compiled:
            raise RuntimeError(f"{key}: cannot compile while a stream captures")
        return self.record(key)


class SimProcess(phases.Process):
    """Process of the phases on the simulator."""

    def __init__(self, case: str, seed: int, layers: int, *, watch: bool = False) -> None:
        self.times, self.notes = {}, {}
        self.framework = self.work = model = StrictModel(SMALL, seed)
        self.driver = model.driver
        model.refusals = {}  # type: ignore[attr-defined]
        model.refusal = model.refusals.get  # type: ignore[attr-defined, method-assign]
        model.keys = model.sizes  # type: ignore[attr-defined]
        self.random = case == "random"

    def capture_all(self) -> Any:
        for key in self.order():
            self.work.eager(key)
        graphs = {key: self.work.capture(key) for key in self.order()}
        return graphs, {key: graph.captured for key, graph in graphs.items()}

    def free_memory(self) -> int:
        return 0

    def latency(self, run: Any, rounds: int = 30) -> float:
        run()
        return 1.0

    def consumes_random(self, graph: Any) -> bool:
        return self.random

    def resize_a_region(self) -> None:
        self.work.named["kv:0"] = SymbolRegion("kv:0", 8, self.work.named["kv:0"].base)


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "Process", SimProcess)
    real = StrictModel.capture
    monkeypatch.setattr(SimGraph, "graph", property(lambda self: self.captured.graph), raising=False)
    monkeypatch.setattr(
        SimGraph, "executable", property(lambda self: self.captured.executable), raising=False
    )
    monkeypatch.setattr(StrictModel, "capture", lambda self, key: SimGraph(self, real(self, key)))


@pytest.mark.slow
def test_all_phases_on_the_simulator(sim: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model refuses a capture that no eager run preceded, so the order of each phase is tested too."""
    results = {}
    for label, function, case, seed, _ in [*verify.ONCE, *verify.AGAIN]:
        results[label] = getattr(phases, function)(case, tmp_path, seed, 2)
        json.dumps(results[label])
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    said = {line["answer"]: line["value"] for line in told}
    assert results["P3"]["bundle"]["graphs"] == 4 and not said["kernels_without_binary"]
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


def test_triggering_reads_graphs_that_still_exist() -> None:
    """PyTorch destroys a raw graph with the object that captured it."""
    alive = list[int]()

    class Graph:
        def __init__(self, number: int) -> None:
            self.number = number
            alive.append(number)

        def raw_cuda_graph(self) -> int:
            return self.number

        def __del__(self) -> None:
            alive.remove(self.number)

    class Work:
        def __init__(self) -> None:
            self.ran = set[str]()
            self.eager = self.ran.add

        def keys(self) -> dict[str, int]:
            return {"a": 1, "b": 2}

        def capture(self, key: str, *, whole: bool) -> Graph:
            assert key in self.ran and not whole
            return Graph(self.keys()[key])

    process, seen = phases.Process.__new__(phases.Process), list[bool]()
    process.work = Work()
    process.driver = SimpleNamespace(see_functions=lambda raw: seen.append(raw in alive))
    process.trigger()
    assert seen == [True, True]


def test_random_graphs_are_refused(sim: None, tmp_path: Path) -> None:
    for seed in (1, 2):
        phases.snapshot("random", tmp_path, seed, 1)
    refused = phases.bundle("random", tmp_path, 3, 1)["refused"]
    assert set(refused.values()) == {"the graph consumes random numbers"}


def test_processes_differ_in_addresses_and_not_in_ordinals() -> None:
    """Later allocations have equal ordinals in all processes, so the counts must agree; the sums must not."""
    sizes = [[t.numel() for t in workloads.scatter(seed)] for seed in range(1, 13)]
    assert len({len(row) for row in sizes}) == 1
    assert len({sum(row) // (2 << 20) for row in sizes}) == len(sizes)
    assert all(a != b for a, b in zip(sizes[0], sizes[1], strict=True))


def test_inputs_do_not_depend_on_earlier_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """All restored graphs run before all eager ones, so what a large graph leaves must not reach a small one."""
    monkeypatch.setattr(workloads.Llama, "sizes", (1, 4))
    monkeypatch.setattr(workloads, "scatter", lambda seed: [])
    for model in (workloads.Llama(1, TINY), workloads.Small(1)):
        small, *_, large = model.keys()
        model.prepare(small, 3)
        model.eager(small)
        want = model.observe(small)
        model.prepare(large, 5)
        model.eager(large)
        model.prepare(small, 3)
        model.eager(small)
        assert model.observe(small) == want


@pytest.mark.slow
def test_check_needs_only_torch_numpy_and_the_bindings() -> None:
    """The GPU machine has neither vLLM nor the other dependencies of this package."""
    root = Path(__file__).parents[4]
    code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"vllm", "typer", "zstandard", "rich", "cryptography", "hypothesis", "huggingface_hub"}:
            raise ImportError(name + " is not installed here")
        if name == "coldstart.artifacts":
            raise ImportError("only the source tree is here")
sys.meta_path.insert(0, Absent())
from benchmarks.gpu import phases, process, verify, workloads
print(sorted(n for n in sys.modules if n.startswith(("coldstart.engine", "coldstart.vllm.graphs"))))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "[]\n", done.stderr + done.stdout


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
