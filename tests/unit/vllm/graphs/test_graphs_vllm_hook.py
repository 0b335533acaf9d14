"""Integration points of the hooks on the installed vLLM, and what a task installs."""

import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.engines import REASON

from coldstart.contract.environment import PLAN
from coldstart.contract.graphs import EngineTask
from coldstart.contract.plan import LaunchPlan
from coldstart.graphs.errors import GraphRefusedError
from coldstart.vllm.graphs import entry, hooks, plugin
from coldstart.vllm.graphs.hooks import build_graph_key, check_runner
from coldstart.vllm.graphs.names import name_runner_tensors

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin.compat, "fallback_sources", [])
    monkeypatch.setattr(plugin.compat, "fallbacks", [])


def reported() -> dict[str, str]:
    return {one["section"]: one["reason"] for one in plugin.compat.build_worker_report()["fallbacks"]}


def test_draft_models_manager_captures_its_own_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It inherits `capture`, and its descriptors have the keys of the target's; the hook is gone after the block."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager

    assert issubclass(SpeculatorCudaGraphManager, CudaGraphManager)
    draft: Any = SpeculatorCudaGraphManager.__new__(SpeculatorCudaGraphManager)
    draft._max_full_descs_to_capture, captured = None, []
    monkeypatch.setattr(CudaGraphManager, "capture", lambda self, forward: captured.append(self))
    before = CudaGraphManager.capture
    with hooks.replace_capture(
        SimpleNamespace(cudagraph_manager=object()), lambda *_: pytest.fail("not called for this capture")
    ):
        assert CudaGraphManager.capture is not before
        CudaGraphManager.capture(draft, None)  # as its own method does
    assert captured == [draft] and CudaGraphManager.capture is before


def test_keys_tell_descriptors_apart() -> None:
    from vllm.config import VllmConfig
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    both = [BatchExecutionDescriptor(CUDAGraphMode.FULL, 4, requests) for requests in (None, 4)]
    assert isinstance(VllmConfig.use_cumem_cudagraph_pool, property)  # read by `check_runner`
    assert build_graph_key(both[0]) == "FULL:num_tokens=4,num_ubatches=1" != build_graph_key(both[1])


def test_a_vllm_of_another_shape_is_left_alone(monkeypatch: pytest.MonkeyPatch, lacking: set[str]) -> None:
    renamed = SimpleNamespace(CudaGraphManager=type("Renamed", (), {}))
    monkeypatch.setitem(sys.modules, hooks.MODULE, renamed)
    with pytest.raises(GraphRefusedError, match=r"this vLLM has no CudaGraphManager.capture"):
        hooks.replace_capture(object(), lambda *_: None).__enter__()
    lacking.add("graphs")
    with pytest.raises(GraphRefusedError, match=REASON):
        check_runner(object())
    assert not hasattr(renamed.CudaGraphManager, "capture")


def test_hook_that_misses_a_name_is_reported_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    modules = {name: SimpleNamespace() for name in (*plugin.RUNNERS, plugin.compiled.DECORATORS_MODULE)}
    worker = SimpleNamespace(Worker=type("Worker", (), {}))
    for name, module in {**modules, plugin.WORKER: worker}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(plugin.compat, "find_unsupported_reason", lambda feature, load=None: None)
    plugin.register(EngineTask(compiled=tmp_path, kv_plan=[{}], restore=tmp_path))
    reasons = reported()
    assert "_try_load_aot_compiled_fn" in reasons["compile"]
    assert "maybe_apply_startup_plan" in reasons["kv"] and "GPUModelRunner" in reasons["graphs"]


@pytest.mark.parametrize(
    ("task", "reasons"),
    [
        (EngineTask(), {}),
        (EngineTask(kv_plan=[{}]), {"kv": REASON}),
        (EngineTask(kv_note=Path("/noted")), {"kv": REASON}),
        (EngineTask(compiled=Path("/none")), {"compile": REASON}),
    ],
)
def test_nothing_is_patched_without_a_request_or_support(
    monkeypatch: pytest.MonkeyPatch, lacking: set[str], task: EngineTask, reasons: dict[str, str]
) -> None:
    lacking |= {"kv-plan", "aot"}
    monkeypatch.setattr(plugin.late, "run_when_imported", lambda *_: pytest.fail("hooked"))
    plugin.register(task)
    assert reported() == reasons


@pytest.mark.parametrize(
    "plan", [None, LaunchPlan([], key="k"), LaunchPlan([], engine=EngineTask(restore=Path("/g")))]
)
def test_plan_says_whether_the_plug_in_runs(monkeypatch: pytest.MonkeyPatch, plan: LaunchPlan | None) -> None:
    monkeypatch.setenv(PLAN, plan.variables()[PLAN] if plan else "")
    found: list[EngineTask] = []
    monkeypatch.setattr(plugin, "register", found.append)
    entry.register()
    assert found == ([plan.engine] if plan and plan.engine.restore else [])


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace vLLM's modules and return them by name when they were patched."""
    made: dict[str, Any] = {}

    def module(name: str) -> Any:
        own = {"capture_model": lambda self, profile_only=False: "own", "load_model": lambda self: "loaded"}
        runner, worker = type("GPUModelRunner", (), own), type("Worker", (), {})
        return made.setdefault(name, SimpleNamespace(GPUModelRunner=runner, Worker=worker))

    monkeypatch.setattr(plugin.late, "run_when_imported", lambda name, work, failed=None: work(module(name)))
    return made


def test_session_prepares_the_load_and_leaves_profiling_captures_alone(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, Any]
) -> None:
    done: list[str] = []
    session = SimpleNamespace(
        prepare_load=lambda: done.append("scattered"),
        run=lambda runner, own: done.append(own()),
        fallbacks={},
    )
    monkeypatch.setattr(plugin, "_create_session", lambda task: session)
    plugin.register(EngineTask(record=Path("/work")))
    runner = installed[plugin.RUNNERS[1]].GPUModelRunner()
    assert runner.load_model() == "loaded" and done == ["scattered"]
    assert runner.capture_model(profile_only=True) == "own" and done == ["scattered"]
    runner.capture_model()
    assert done == ["scattered", "own"]


# --- the runner ---


class Buffers:
    """Fake with the module name of a vLLM class."""

    __module__ = "vllm.v1.worker.gpu.input_batch"

    def __init__(self) -> None:
        self.ids, self.nested = torch.zeros(4), {"a": [torch.ones(2), None]}
        self.me = self


def _runner() -> Any:
    model = torch.nn.Linear(2, 2)
    layers = {
        "layers.0": SimpleNamespace(kv_cache=torch.zeros(3)),
        "layers.1": SimpleNamespace(kv_cache=[torch.zeros(3)] * 2),
    }
    runner = type("Runner", (), {"__module__": "vllm.v1.worker.gpu.model_runner"})()
    runner.__dict__ |= {
        "model": SimpleNamespace(unwrap=lambda: model), "input_buffers": Buffers(),
        "other": Namespace(hidden=torch.zeros(9)),  # of another package, which is not entered
        "compilation_config": SimpleNamespace(static_forward_context=layers),
        "parallel_config": SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        "vllm_config": SimpleNamespace(use_cumem_cudagraph_pool=False), "cudagraph_manager": SimpleNamespace(),
    }  # fmt: skip
    return runner


def test_the_first_model_runner_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks.compat, "CHECKED_VERSIONS", {})
    runner = _runner()
    del runner.cudagraph_manager
    with pytest.raises(GraphRefusedError, match="model runner V1"):
        check_runner(runner)


def test_names_of_everything_a_runner_reaches() -> None:
    assert sorted(name_runner_tensors(_runner(), lambda tensor: True)) == [
        "kv:layers.0", "kv:layers.1.0", "kv:layers.1.1", "param:bias", "param:weight",
        "static:input_buffers.ids", "static:input_buffers.nested.a.0",
    ]  # fmt: skip
