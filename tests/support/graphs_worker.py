"""Doubles of vLLM's worker over the simulator: runner, graph manager, tensors and the processes of materialize.

What stands in: the driver and the framework (simulated), the manager and its capture loop (as vLLM 0.32's), tensors.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from coldstart.contract.graphs import EngineTask
from coldstart.graphs import offline
from coldstart.graphs.api import Captured
from coldstart.graphs.tables import SymbolRegion
from coldstart.vllm.graphs import hooks, record, restore
from tests.support.graphs.model import Shape, SimModel
from tests.support.graphs_tools import proven

OUT = "static:cudagraph_manager.hidden_states"
# A graph computes as many rows as its descriptor has tokens.
SHAPE = Shape("worker", 2, sizes=(1, 8, 64, 256), divide=1)


class Mode(Enum):
    FULL, PIECEWISE = 2, 1


@dataclass(frozen=True)
class Descriptor:
    cg_mode: Mode
    num_tokens: int


class Tensor:
    """Region of the simulated memory with the interface of a tensor of 4-byte elements."""

    def __init__(self, region: SymbolRegion, *columns: int) -> None:
        self._region, self.nbytes = region, region.size
        self.shape = (region.size // 4 // (columns[0] if columns else 1), *columns)
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
        sizes = sorted(self.model.sizes.values(), reverse=True)
        full, piece = [Descriptor(Mode.FULL, n) for n in sizes], Descriptor(Mode.PIECEWISE, sizes[0])
        self._capture_descs = {Mode.FULL: full, Mode.PIECEWISE: [piece]}
        self.captured: list[int] = []

    def capture(self, create_forward_fn: Any, progress_bar_desc: str = "") -> None:
        for desc in chain(*self._capture_descs.values()):
            create_forward_fn(desc, True)
            create_forward_fn(desc, False)
            self.graphs[desc] = Graph(self.model.capture(f"decode:{desc.num_tokens}"))
            self.captured += [desc.num_tokens] if desc.cg_mode is Mode.FULL else []


class Framework:
    """Framework of the simulated model under vLLM's keys."""

    def __init__(self, model: SimModel, sizes: dict[str, int], capture: Any) -> None:
        self._model, self.sizes, self._capture = model, sizes, capture

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def regions(self) -> list[SymbolRegion]:
        return [replace(r, symbol=OUT) if s == "static:out" else r for s, r in self._model.named.items()]

    def capture(self, key: str) -> Captured:
        return self._capture(key).captured  # type: ignore[no-any-return]


@dataclass
class Runner:
    model: SimModel
    parallel_config: Any = field(
        default_factory=lambda: SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
    )
    vllm_config: Any = field(default_factory=lambda: SimpleNamespace(use_cumem_cudagraph_pool=False))
    model_config: Any = field(default_factory=lambda: SimpleNamespace(get_vocab_size=lambda: 64))

    def __post_init__(self) -> None:
        self.cudagraph_manager = Manager(self.model)
        # vLLM allocates this buffer with torch.empty: the rows that no graph wrote differ between processes.
        out = self.model.named["static:out"]
        self.model.driver.write(out.base, np.random.default_rng().bytes(out.size))

    def forward(self, desc: Descriptor, warmup: bool) -> None:
        """Write the inputs of this size like vLLM's factory."""
        self.model.prepare(f"decode:{desc.num_tokens}", 7)

    def execute_model(self, scheduled: int) -> str:
        """Run a live step."""
        self.model.prepare("decode:8", scheduled)
        return f"step {scheduled}"

    def own(self) -> str:
        shape = self.model.shape
        self.cudagraph_manager.hidden_states = Tensor(self.model.named["static:out"], shape.width)
        self.cudagraph_manager.capture(self.forward)
        return "captured"


KEYS = [f"FULL:num_tokens={size}" for size in SHAPE.sizes]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> dict[str, SimModel]:
    """Worker modules over the doubles; `model` is the current process."""
    return replace_worker(monkeypatch)


def replace_worker(monkeypatch: pytest.MonkeyPatch) -> dict[str, SimModel]:
    """Let the worker's sessions work on simulated processes, of which the returned dictionary has the current one."""
    now: dict[str, SimModel] = {}

    def framework(driver: Any, tensors: Any, sizes: Any, capture: Any, pool: Any) -> Framework:
        return Framework(now["model"], sizes, capture)

    def tensors(runner: Any) -> dict[str, Any]:
        regions = Framework(now["model"], {}, None).regions()
        return {r.symbol: Tensor(r) for r in regions}

    monkeypatch.setitem(sys.modules, hooks.MODULE, SimpleNamespace(CudaGraphManager=Manager))
    monkeypatch.setattr(hooks, "require_support", lambda: None)
    for module in (record, restore):
        monkeypatch.setattr(module, "CudaDriver", lambda *log: now["model"].driver)
        monkeypatch.setattr(module, "name_runner_tensors", tensors)
    monkeypatch.setattr(record, "TorchFramework", framework)
    monkeypatch.setattr(record, "ModuleWatch", lambda log: None)
    monkeypatch.setattr(restore, "allocate_output", lambda runner, like: None)
    return now


Change = Callable[[SimModel], None]


class Rounds:
    """Starter of the processes of materialize, each with a new model; `step` can change the model before each live step."""

    def __init__(
        self, here: dict[str, SimModel], shape: Shape = SHAPE, before: Change = lambda model: None, *, steps: int = 3,
        step: Change = lambda model: None, between: Callable[[str], None] = lambda name: None,
    ) -> None:  # fmt: skip
        self.names = list[str]()
        self._here, self._shape, self._before = here, shape, before
        self._steps, self._step, self._between = steps, step, between

    def __call__(self, name: str, task: EngineTask) -> None:
        self._between(name)
        self._here["model"] = model = SimModel(self._shape, 100 + len(self.names))
        self.names.append(name)
        session = (
            restore.ProvingSession(task.prove)
            if task.prove
            else record.RecordingSession(task.record or Path())
        )
        runner = Runner(model)
        self._before(model)
        assert session.run(runner, runner.own) == "captured"
        for number in range(self._steps):
            self._step(model)
            assert runner.execute_model(number) == f"step {number}"


def start(
    here: dict[str, SimModel], bundle: Path, *, before: Change = lambda model: None
) -> tuple[restore.RestoringSession, Runner]:
    """Start from the bundle in a new process; `before` can change the process."""
    here["model"] = model = SimModel(SHAPE, 200)
    session, runner = restore.RestoringSession(bundle), Runner(model)
    before(model)
    session.run(runner, runner.own)
    return session, runner


@pytest.fixture(scope="session")
def bundle_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A proven bundle of the small simulated model, for all tests that only read it."""
    proven(directory := tmp_path_factory.mktemp("graphs") / "bundle")
    return directory


@pytest.fixture(scope="session")
def rounds_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that simulated workers recorded and proved."""
    with pytest.MonkeyPatch.context() as patch:
        return offline.run_offline_phase(tmp_path_factory.mktemp("rounds"), Rounds(replace_worker(patch)))
