"""The vLLM plug-in's parts that need no GPU: names, keys, outputs, and doing nothing when not asked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coldstart.contract.graphs import EngineTask
from coldstart.graphs import gate, table_files
from coldstart.graphs.errors import GraphRefusedError, NotProvenError
from coldstart.graphs.tables import SymbolRegion
from coldstart.vllm.graphs import outputs, plugin
from coldstart.vllm.graphs.graph_source import refuse_unsupported
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
        "vllm_config": SimpleNamespace(use_cumem_cudagraph_pool=False),
    }  # fmt: skip
    return runner


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
    monkeypatch.setattr(plugin.hook, "require", lambda: None)
    return made


def test_bundle_without_a_proof_is_not_used_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: dict[str, Any]
) -> None:
    plugin.register(EngineTask(restore=tmp_path))
    assert installed[plugin.RUNNERS[0]].GPUModelRunner().capture_model() == "own"
    worker = installed[plugin.WORKER].Worker()
    assert "proof" in getattr(worker, plugin.GRAPHS_REPORT)()["*"]
    with pytest.raises(NotProvenError):
        Restoring(tmp_path)


def test_impossible_round_is_reported_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: dict[str, Any]
) -> None:
    def refuse() -> None:
        raise GraphRefusedError("no adapter for vLLM 9")

    monkeypatch.setattr(plugin.hook, "require", refuse)
    plugin.register(EngineTask(record=tmp_path))
    assert (tmp_path / "reason").read_text() == "no adapter for vLLM 9"


def test_memory_is_scattered_before_the_weights_are_loaded(
    installed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    class Session(plugin.Declined):
        def prepare_load(self) -> None:
            done.append("scattered")

    plugin._install(plugin.Later(lambda: Session("x")), recording=True)
    assert installed[plugin.RUNNERS[1]].GPUModelRunner().load_model() == "loaded" and done == ["scattered"]


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


def test_outputs_are_places_in_the_pool() -> None:
    tensor = torch.zeros(4, 8, dtype=torch.bfloat16)
    pool = [SymbolRegion("pool:0", 4096, tensor.data_ptr() - 512)]
    found = outputs.describe(tensor[2:], pool)
    assert found == {
        "symbol": "pool:0",
        "offset": 512 + 32,
        "shape": [2, 8],
        "stride": [8, 1],
        "dtype": "bfloat16",
    }
    assert outputs.describe(tensor, []) is None and outputs.describe((tensor, 3), pool) is None
    both = outputs.describe((tensor[2:], [tensor]), pool)
    assert [like["offset"] for like in outputs.leaves(both)] == [544, 512]
    assert outputs.view(both, lambda like: like["offset"]) == (544, [512])
    assert [outputs.size(like) for like in outputs.leaves(both)] == [32, 64]
    assert outputs.spans((tensor, tensor[2:])) == [(tensor.data_ptr(), 64), (tensor.data_ptr() + 32, 32)]
    assert outputs.spans(None) is None and outputs.spans((tensor, 3)) is None
    with pytest.raises(GraphRefusedError):
        outputs.view(None, list)


def test_refused_start_captures_graphs(
    bundle_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(bundle_directory, tmp_path / "b"))
    report = {outputs.ENTRY: {"attributes": {}, "outputs": {}}}
    tables = table_files.load(copy)
    tables.report |= report
    seal = table_files.save(tables, copy, {})
    proof = json.loads((copy / gate.PROOF).read_text())
    (copy / gate.PROOF).write_text(json.dumps(proof | {"seal": seal}))
    session = Restoring(copy)

    def broken(runner: Any) -> None:
        raise GraphRefusedError("no device")

    monkeypatch.setattr(session, "_begin", broken)
    assert session.run(_runner(), lambda: "captured") == "captured"
    assert session.fallbacks() == {"*": "no device"}
