"""The vLLM plug-in's parts that need no GPU: names, keys, outputs, and doing nothing when not asked."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coldstart.contract.graphs import EngineTask
from coldstart.contract.plan import PLAN_ENV, LaunchPlan
from coldstart.graphs.errors import GraphRefusedError
from coldstart.vllm.graphs import entry, hooks, plugin
from coldstart.vllm.graphs.hooks import refuse_unsupported
from coldstart.vllm.graphs.names import runner_tensors
from coldstart.vllm.graphs.restore import Restoring

torch = pytest.importorskip("torch")


class Buffers:
    """Fake with the module name of a vLLM class."""

    __module__ = "vllm.v1.worker.gpu.input_batch"

    def __init__(self) -> None:
        self.ids, self.nested = torch.zeros(4), {"a": [torch.ones(2), None]}
        self.me = self


class Foreign:
    """Class of another package that must not be entered."""

    def __init__(self) -> None:
        self.hidden = torch.zeros(9)


def _runner() -> Any:
    model = torch.nn.Linear(2, 2)
    wrapper = SimpleNamespace(unwrap=lambda: model)
    layers = {
        "layers.0": SimpleNamespace(kv_cache=torch.zeros(3)),
        "layers.1": SimpleNamespace(kv_cache=[torch.zeros(3)] * 2),
    }
    runner = type("Runner", (), {"__module__": "vllm.v1.worker.gpu.model_runner"})()
    runner.__dict__ |= {
        "model": wrapper, "input_buffers": Buffers(), "other": Foreign(),
        "compilation_config": SimpleNamespace(static_forward_context=layers),
        "parallel_config": SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        "vllm_config": SimpleNamespace(use_cumem_cudagraph_pool=False), "cudagraph_manager": SimpleNamespace(),
    }  # fmt: skip
    return runner


def _run(session: Any) -> dict[str, str]:
    """Return the fallbacks of a session in whose place vLLM captures."""
    assert session.run(_runner(), lambda: "captured") == "captured"
    return dict(session.fallbacks)


def test_names_of_everything_a_runner_reaches() -> None:
    assert sorted(runner_tensors(_runner(), lambda tensor: True)) == [
        "kv:layers.0", "kv:layers.1.0", "kv:layers.1.1", "param:bias", "param:weight",
        "static:input_buffers.ids", "static:input_buffers.nested.a.0",
    ]  # fmt: skip


def test_nothing_is_patched_without_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        plugin.late, "when_imported", lambda name, work, failed=None: pytest.fail(f"patched {name}")
    )
    plugin.register(EngineTask())


@pytest.mark.parametrize(
    ("plan", "called"),
    [
        (None, []),
        (LaunchPlan([], key="k", canary={"prompt": [1]}), []),
        (LaunchPlan([], engine=EngineTask(restore=Path("/g"))), [EngineTask(restore=Path("/g"))]),
    ],
)
def test_the_plan_says_whether_the_plug_in_is_wanted(
    monkeypatch: pytest.MonkeyPatch, plan: LaunchPlan | None, called: list[EngineTask]
) -> None:
    monkeypatch.setenv(PLAN_ENV, plan.variables()[PLAN_ENV] if plan else "")
    found: list[EngineTask] = []
    monkeypatch.setattr(plugin, "register", found.append)
    entry.register()
    assert found == called


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace vLLM's modules and return the patched names by module."""
    made: dict[str, Any] = {}

    def module(name: str) -> Any:
        runner = type(
            "GPUModelRunner", (), {"capture_model": lambda self: "own", "load_model": lambda self: "loaded"}
        )
        return made.setdefault(name, SimpleNamespace(GPUModelRunner=runner, Worker=type("Worker", (), {})))

    monkeypatch.setattr(plugin.late, "when_imported", lambda name, work, failed=None: work(module(name)))
    return made


def test_bundle_without_a_proof_is_not_used_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: dict[str, Any]
) -> None:
    monkeypatch.setattr(plugin.compat, "sources", [])
    plugin.register(EngineTask(restore=tmp_path))
    (fallback,) = plugin.compat.report()["fallbacks"]
    assert fallback["section"] == "graphs" and "no CUDA graph" in fallback["reason"]
    assert "cannot read the proof" in _run(Restoring(tmp_path))["*"]


def test_impossible_round_is_reported_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: dict[str, Any]
) -> None:
    monkeypatch.setattr(hooks.compat, "check", lambda feature: f"no adapter for {feature}")
    plugin.register(EngineTask(record=tmp_path))
    assert installed[plugin.RUNNERS[0]].GPUModelRunner().capture_model() == "own"
    assert (tmp_path / "reason").read_text() == "no adapter for graphs"


def test_memory_is_scattered_before_the_weights_are_loaded(
    installed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    monkeypatch.setattr(plugin.compat, "sources", [])
    plugin._install(SimpleNamespace(prepare_load=lambda: done.append("scattered"), run=None, fallbacks={}))
    assert installed[plugin.RUNNERS[1]].GPUModelRunner().load_model() == "loaded" and done == ["scattered"]


def test_the_first_model_runner_is_refused() -> None:
    runner = _runner()
    del runner.cudagraph_manager
    with pytest.raises(GraphRefusedError, match="first model runner"):
        refuse_unsupported(runner)


@pytest.mark.parametrize("backend", ["cumem", "cuda-checkpoint"])
def test_the_pool_of_the_sleep_mode_is_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own rule decides whether it captures into that pool."""
    config, platforms = pytest.importorskip("vllm.config"), pytest.importorskip("vllm.platforms")
    monkeypatch.setattr(type(platforms.current_platform), "is_cuda_alike", lambda self: True)
    runner = _runner()
    model = SimpleNamespace(
        sleep_mode_offload_cudagraph=True, enable_sleep_mode=True, sleep_mode_backend=backend
    )
    runner.vllm_config = object.__new__(config.VllmConfig)
    runner.vllm_config.__dict__ |= {
        "model_config": model,
        "compilation_config": SimpleNamespace(cudagraph_mode=config.CUDAGraphMode.FULL),
    }
    if backend == "cumem":
        with pytest.raises(GraphRefusedError, match="--sleep-mode-offload-cudagraph"):
            refuse_unsupported(runner)
    else:
        refuse_unsupported(runner)


def test_profiling_captures_are_left_alone() -> None:
    seen: list[Any] = []
    hooked = plugin._wrapped(lambda self, profile_only=False: "own", lambda runner, own: seen.append(own()))
    assert hooked(object(), profile_only=True) == "own" and seen == []
    hooked(object())
    assert seen == ["own"]


def test_a_bundle_of_another_engine_is_not_used(bundle_directory: Path) -> None:
    assert _run(Restoring(bundle_directory)) == {"*": "the bundle was not recorded from vLLM"}


def test_refused_start_captures_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(runner: Any) -> None:
        raise GraphRefusedError("no device")

    session = Restoring(tmp_path)
    monkeypatch.setattr(session, "_restore", broken)
    assert _run(session) == {"*": "no device"}


def test_modules_are_worked_on_when_they_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coldstart.vllm.late import when_imported

    # Work of other tests on modules that are not imported here stays pending.
    before = list(sys.meta_path)
    (tmp_path / "late_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[int] = []
    when_imported("late_module", lambda module: seen.append(module.value))
    when_imported("late_module", lambda module: seen.append(module.value + 1))
    assert seen == [] and "late_module" not in sys.modules
    import late_module  # type: ignore[import-not-found]

    assert sorted(seen) == [1, 2]
    when_imported("late_module", lambda module: seen.append(3))
    assert seen[-1] == 3 and late_module.value == 1
    assert sys.meta_path == before
