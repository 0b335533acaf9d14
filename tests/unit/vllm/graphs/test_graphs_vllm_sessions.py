"""The vLLM worker's sessions (record twice, prove, restore) on the simulator, with fakes for vLLM's code.

What stands in: the driver and the framework (simulated), the manager and its capture loop (as vLLM 0.32's), tensors.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.graphs_tools import SMALL

from coldstart.contract.graphs import EngineTask
from coldstart.graphs import gate, offline, rounds, table_files
from coldstart.graphs.api import Captured
from coldstart.graphs.errors import DriverError, GraphRefusedError
from coldstart.graphs.tables import SymbolRegion
from coldstart.system.devices import nvml
from coldstart.vllm.graphs import hook, record, restore
from coldstart.vllm.graphs.graph_source import refuse_parallel
from tests.support.graphs.model import SimModel

torch = pytest.importorskip("torch")
OUT = "static:cudagraph_manager.hidden_states"
INPUTS = ("ids", "positions", "slots", "lengths")


class Mode(Enum):
    FULL = 2


@dataclass(frozen=True)
class Descriptor:
    cg_mode: Mode
    num_tokens: int


class Tensor:
    """Region of the simulated memory with the interface of a tensor."""

    def __init__(self, region: SymbolRegion) -> None:
        self._region, self.nbytes, self.shape = region, region.size, (region.size // 4,)
        self.dtype = "torch.float32"

    def is_floating_point(self) -> bool:
        return self._region.symbol.startswith(("kv:", "param:")) or self._region.symbol == OUT

    def untyped_storage(self) -> Any:
        return SimpleNamespace(nbytes=lambda: self._region.size, data_ptr=lambda: self._region.base)

    def element_size(self) -> int:
        return 4


class Graph:
    """Fake CUDAGraph that retains its raw graph."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured


@dataclass
class Manager:
    model: SimModel
    graphs: dict[Any, Any] = field(default_factory=dict)
    hidden_states: Any = None
    pool: tuple[int, int] = (0, 1)
    _max_full_descs_to_capture: int | None = None

    def __post_init__(self) -> None:
        sizes = sorted(self.model.sizes().values(), reverse=True)
        self._capture_descs = {Mode.FULL: [Descriptor(Mode.FULL, n) for n in sizes]}
        self._candidates = {(d.num_tokens, 0): [d] for d in self._capture_descs[Mode.FULL]}
        self.captured: list[int] = []

    def capture(self, create_forward_fn: Any, progress_bar_desc: str = "") -> None:
        for desc in self._capture_descs[Mode.FULL]:
            create_forward_fn(desc, True)
            create_forward_fn(desc, False)
            self.graphs[desc] = Graph(self.model.capture(f"decode:{desc.num_tokens}"))
            self.captured.append(desc.num_tokens)


class Framework:
    """FrameworkApi of the simulated model under vLLM's keys."""

    def __init__(self, model: SimModel, sizes: dict[str, int], capture: Any) -> None:
        self._model, self._sizes, self._capture, self.refusals = model, sizes, capture, dict[str, str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def sizes(self) -> dict[str, int]:
        return self._sizes

    def regions(self) -> list[SymbolRegion]:
        return [replace(r, symbol=OUT) if s == "static:out" else r for s, r in self._model.named.items()]

    def capture(self, key: str) -> Captured:
        captured: Captured = self._capture(key).captured
        return captured

    def refusal(self, key: str) -> str | None:
        return self.refusals.get(key)


@dataclass
class Runner:
    model: SimModel
    parallel_config: Any = field(
        default_factory=lambda: SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
    )
    model_config: Any = field(default_factory=lambda: SimpleNamespace(get_vocab_size=lambda: 64))

    def __post_init__(self) -> None:
        self.cudagraph_manager = Manager(self.model)

    def forward(self, desc: Descriptor, warmup: bool) -> None:
        """Write the inputs of this size like vLLM's factory."""
        self.model.prepare(f"decode:{desc.num_tokens}", 7)

    def execute_model(self, scheduled: int) -> str:
        """Run a live step."""
        self.model.prepare("decode:8", scheduled)
        return f"step {scheduled}"

    def own(self) -> str:
        self.cudagraph_manager.hidden_states = Tensor(self.model.named["static:out"])
        self.cudagraph_manager.capture(self.forward)
        return "captured"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> dict[str, SimModel]:
    """Runner whose `model` is the current process."""
    now: dict[str, SimModel] = {}
    runner = type("R", (), {"_warmup_and_capture": None})
    places = {"manager": (Manager, "capture"), "runner": (runner, "_warmup_and_capture")}

    def framework(driver: Any, tensors: Any, sizes: Any, capture: Any, pool: Any) -> Framework:
        return Framework(now["model"], sizes, capture)

    def tensors(runner: Any) -> dict[str, Any]:
        regions = Framework(now["model"], {}, None).regions()
        return {r.symbol: Tensor(r) for r in regions}

    monkeypatch.setattr(hook, "_places", lambda: places)
    monkeypatch.setattr(hook, "require", lambda: None)
    for module in (record, restore):
        monkeypatch.setattr(module, "CudaDriver", lambda *log: now["model"].driver)
        monkeypatch.setattr(module, "runner_tensors", tensors)
        monkeypatch.setattr(module, "TorchFramework", framework)
    monkeypatch.setattr(record, "ModuleWatch", lambda log: None)
    monkeypatch.setattr(record, "consumes_random", lambda graph: False)
    monkeypatch.setattr(restore, "make_attributes", lambda runner, wanted: {})
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **settings: None)
    return now


def sessions(here: dict[str, SimModel], work: Path) -> Path:
    """Run the rounds of materialize, each with a new model instead of a process."""

    def launch(name: str, task: EngineTask) -> None:
        here["model"] = model = SimModel(SMALL, 100 + len(seeds))
        seeds.append(name)
        session = record.GraphRecording(work) if task.prove is None else restore.Proving(task.prove)
        runner = Runner(model)
        assert session.run(runner, runner.own) == "captured"
        assert [runner.execute_model(n) for n in range(3)] == ["step 0", "step 1", "step 2"]

    seeds: list[str] = []
    return offline.make(work, launch)


@pytest.fixture
def bundle_directory(here: dict[str, SimModel], tmp_path: Path) -> Path:
    return sessions(here, tmp_path)


def _start(
    here: dict[str, SimModel], bundle_directory: Path, seed: int = 200, **options: Any
) -> tuple[Any, Runner]:
    here["model"] = model = SimModel(SMALL, seed)
    session, runner = restore.Restoring(bundle_directory, **options), Runner(model)
    session.run(runner, runner.own)
    if session.online is not None:
        session.online.restorer.wait()
    return session, runner


def _equal(runner: Runner) -> dict[int, bool]:
    """Compare each graph of vLLM with a new capture."""
    model, found = runner.model, {}
    for desc, graph in runner.cudagraph_manager.graphs.items():
        key = f"decode:{desc.num_tokens}"
        held = graph.captured.executable if isinstance(graph, Graph) else graph.executable
        results = []
        for executable in (held, model.capture(key).executable):
            model.prepare(key, 5)
            model.driver.launch(executable, 0)
            results.append(model.observe(key))
        found[desc.num_tokens] = results[0] == results[1]
    return found


def test_recorded_and_proved_inside_the_worker(bundle_directory: Path) -> None:
    tables, proof = table_files.load(bundle_directory), gate.read_proof(bundle_directory)
    assert len(proof.proven) == 4 and proof.adopt and not proof.eager and proof.canary is not None
    assert proof.canary[0] == "FULL:num_tokens=1" and set(proof.hashes) == set(tables.keys)
    held = tables.report["workload"]
    assert held["outputs"]["FULL:num_tokens=8"] == [[OUT, 0, 1024]] and len(held["kv"]) == 2
    assert set(held["static"]["FULL:num_tokens=1"]) == {OUT, *(f"static:{n}" for n in INPUTS)}


def test_a_start_captures_nothing(here: dict[str, SimModel], bundle_directory: Path) -> None:
    session, runner = _start(here, bundle_directory)
    assert runner.cudagraph_manager.captured == [] and session.fallbacks() == {}
    assert _equal(runner) == dict.fromkeys((1, 8, 64, 256), True)
    assert all(rows for rows in runner.cudagraph_manager._candidates.values())


def test_every_graph_can_be_a_canary(here: dict[str, SimModel], bundle_directory: Path) -> None:
    assert _start(here, bundle_directory, canary="all")[0].fallbacks() == {}


def test_a_wrong_canary_drops_everything_before_the_first_answer(
    here: dict[str, SimModel], bundle_directory: Path
) -> None:
    proof = json.loads((bundle_directory / gate.PROOF).read_text())
    proof["hashes"]["FULL:num_tokens=1"] = "0" * 64
    (bundle_directory / gate.PROOF).write_text(json.dumps(proof))
    session, runner = _start(here, bundle_directory)
    assert "canary" in session.fallbacks()["*"] and runner.cudagraph_manager.captured == [256, 64, 8, 1]
    assert _equal(runner) == dict.fromkeys((1, 8, 64, 256), True)
    assert not here["model"].reserved
    without, runner = _start(here, bundle_directory, seed=201, canary="0")
    assert without.fallbacks() == {} and runner.cudagraph_manager.captured == []


def test_one_graph_that_cannot_be_built_is_captured_and_named(
    here: dict[str, SimModel], bundle_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SimModel(SMALL, 0).driver.__class__.instantiate

    def broken(self: Any, graph: int) -> int:
        if len(self._get(graph, type(self.objects[graph]), "x").nodes) == small and not self.capturing_done:
            raise DriverError("cuGraphInstantiate", "OUT_OF_MEMORY")
        return real(self, graph)

    tables = table_files.load(bundle_directory)
    small = int(tables.graphs["nodes"][tables.keys.index("FULL:num_tokens=256")])
    monkeypatch.setattr(SimModel(SMALL, 0).driver.__class__, "capturing_done", False, raising=False)
    monkeypatch.setattr(SimModel(SMALL, 0).driver.__class__, "instantiate", broken)
    own = Runner.own

    def captures(self: Runner) -> str:
        monkeypatch.setattr(self.model.driver, "capturing_done", True, raising=False)
        return own(self)

    monkeypatch.setattr(Runner, "own", captures)
    session, runner = _start(here, bundle_directory)
    assert "OUT_OF_MEMORY" in session.fallbacks()["FULL:num_tokens=256"]
    assert 256 in runner.cudagraph_manager.captured and _equal(runner)[256]


def test_another_driver_of_the_same_branch_captures(
    here: dict[str, SimModel], bundle_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "driver", lambda: "580.159.04")
    session, runner = _start(here, bundle_directory)
    assert session.fallbacks()["*"].endswith("this machine has 580.159.04")
    assert runner.cudagraph_manager.captured == [256, 64, 8, 1]


def test_several_ranks_are_captured(
    here: dict[str, SimModel], bundle_directory: Path, tmp_path: Path
) -> None:
    here["model"] = model = SimModel(SMALL, 300)
    runner = Runner(model, parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1))
    session = restore.Restoring(bundle_directory)
    assert session.run(runner, runner.own) == "captured" and "collectives" in session.fallbacks()["*"]
    (tmp_path / "ranks").mkdir()
    record.GraphRecording(tmp_path / "ranks").run(runner, runner.own)
    assert "collectives" in (tmp_path / "ranks" / rounds.REASON).read_text()
    with pytest.raises(GraphRefusedError):
        refuse_parallel(runner)
