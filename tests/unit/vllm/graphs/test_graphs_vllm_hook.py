"""The hook's integration points on the installed vLLM, its logic on fakes, and KV plans with vLLM's check."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coldstart.contract.graphs import COMPILE_REPORT, KV_REPORT, EngineTask
from coldstart.graphs.errors import DriverError, GraphRefusedError
from coldstart.vllm.graphs import hook, kv_plan, plugin
from coldstart.vllm.graphs import manager as managers
from coldstart.vllm.graphs import wrapper as wrappers
from coldstart.vllm.graphs.graph_source import graph_key
from coldstart.vllm.graphs.record import captured_graphs

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


class Mode(Enum):
    FULL = 2
    PIECEWISE = 1


@dataclass(frozen=True)
class Descriptor:
    cg_mode: Mode
    num_tokens: int
    num_reqs: int | None = None
    num_ubatches: int = 1


class Source:
    """Source that restores the given graphs; the others fail or are absent."""

    def __init__(
        self, usable: set[int], broken: set[int] = frozenset(), behind: set[int] = frozenset()  # type: ignore[assignment]
    ) -> None:  # fmt: skip
        self._usable, self._broken, self._behind = usable, broken, behind
        self.waiting: dict[int, Any] = {}

    def _tokens(self, key: str) -> int:
        return int(key.split("num_tokens=")[1].split(",")[0])

    def usable(self, key: str) -> bool:
        return self._tokens(key) in self._usable

    def is_first(self, key: str) -> bool:
        return self._tokens(key) not in self._behind

    def defer(self, key: str, show: Any) -> None:
        self.waiting[self._tokens(key)] = show

    def replayable(self, key: str) -> Any:
        if self._tokens(key) in self._broken:
            raise DriverError("cuGraphInstantiate", "OUT_OF_MEMORY")
        return f"restored {self._tokens(key)}"

    def output(self, key: str) -> Any:
        return f"output {self._tokens(key)}"

    def attributes(self) -> Mapping[str, Any]:
        return {"hidden_states": "buffer"}


@dataclass
class Manager:
    _capture_descs: dict[Mode, list[Descriptor]]
    graphs: dict[Descriptor, Any] = field(default_factory=dict)
    hidden_states: Any = None
    _max_full_descs_to_capture: int | None = None
    _candidates: dict[Any, list[Descriptor]] = field(default_factory=dict)


def _capture(self: Manager, create_forward_fn: Any, progress_bar_desc: str = "") -> None:
    for rows in self._capture_descs.values():
        self.graphs |= {row: f"captured {row.num_tokens}" for row in rows}


def _runner(manager: Any) -> Any:
    return SimpleNamespace(cudagraph_manager=manager)


def _manager() -> Manager:
    full = [Descriptor(Mode.FULL, n) for n in (4, 2, 1)]
    return Manager({Mode.FULL: full, Mode.PIECEWISE: [Descriptor(Mode.PIECEWISE, 8)]})


def test_the_manager_gets_restored_graphs_and_captures_the_rest() -> None:
    manager, said = _manager(), []
    hooked = managers.restoring(_capture, _runner(manager), Source({4, 1, 8}, broken={1}), said.append)
    hooked(manager, None)
    found = {(d.cg_mode.name, d.num_tokens): g for d, g in manager.graphs.items()}
    assert found == {
        ("FULL", 4): "restored 4", ("FULL", 2): "captured 2", ("FULL", 1): "captured 1",
        ("PIECEWISE", 8): "captured 8",
    }  # fmt: skip
    assert [d.num_tokens for d in manager._capture_descs[Mode.FULL]] == [4, 2, 1]
    assert manager.hidden_states == "buffer" and "captured normally" in said[0]


def test_graph_in_progress_is_hidden_from_dispatch() -> None:
    manager, source = _manager(), Source({4, 2, 1}, broken={2}, behind={2, 4})
    full = manager._capture_descs[Mode.FULL]
    manager._candidates = {(n, 0): [d for d in reversed(full) if d.num_tokens >= n] for n in (1, 2, 3)}
    managers.restoring(_capture, _runner(manager), source, print)(manager, None)
    assert [d.num_tokens for d in manager.graphs if d.cg_mode is Mode.FULL] == [1]
    assert {key: [d.num_tokens for d in rows] for key, rows in manager._candidates.items()} == {
        (1, 0): [1], (2, 0): [], (3, 0): []
    }  # fmt: skip
    source.waiting[4]()
    assert [d.num_tokens for d in manager._candidates[1, 0]] == [1, 4] and manager.graphs[
        full[0]
    ] == "restored 4"
    with pytest.raises(DriverError):
        source.waiting[2]()
    assert full[1] not in manager.graphs and full[1] not in manager._candidates[2, 0]


@needs_vllm
def test_vllm_dispatch_avoids_hidden_graphs() -> None:
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

    two, four = (BatchExecutionDescriptor(CUDAGraphMode.FULL, n, n) for n in (2, 4))
    manager = CudaGraphManager.__new__(CudaGraphManager)
    vars(manager).update(
        graphs={}, _graphs_captured=True, _candidates={(2, 0): [two], (4, 0): [four]}, _lora_dispatch_map={},
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1)),
    )  # fmt: skip
    curtain = managers.Curtain(manager)
    curtain.hide(four)
    assert manager.dispatch(2, 2, None, 0) == two
    assert manager.dispatch(4, 4, None, 0).cg_mode == CUDAGraphMode.NONE
    curtain.show(four, "graph")
    assert manager.dispatch(4, 4, None, 0) == four and manager.graphs == {four: "graph"}


@needs_vllm
def test_piecewise_graphs_are_captured_by_vllm() -> None:
    """A restored piece would read the bundle's pool, while the captured piece before it writes another one."""
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    before = CUDAGraphWrapper.__call__
    undo = hook.install(object(), Source({8}), print)
    assert CUDAGraphWrapper.__call__ is before
    undo()
    manager, wrapper = _manager(), SimpleNamespace(concrete_cudagraph_entries={}, is_debugging_mode=False)
    managers.restoring(_capture, _runner(manager), Source({8}), print)(manager, None)
    assert {g for d, g in manager.graphs.items() if d.cg_mode is Mode.PIECEWISE} == {"captured 8"}
    runner, called = SimpleNamespace(model=wrapper), list[Any]()
    hooked = wrappers.restoring(lambda *a: called.append(a), runner, Source({8}), print)
    hooked(runner, Descriptor(Mode.PIECEWISE, 8), Mode.PIECEWISE)
    assert len(called) == 1 and wrapper.concrete_cudagraph_entries == {}
    assert set(captured_graphs(SimpleNamespace(cudagraph_manager=manager))) == {
        graph_key(d, "FULL") for d in manager.graphs if d.cg_mode is Mode.FULL
    }


@needs_vllm
def test_the_wrapper_of_the_other_runner_gets_finished_entries() -> None:
    from vllm.compilation.cuda_graph import CUDAGraphEntry
    from vllm.forward_context import BatchDescriptor

    called: list[int] = []
    wrapper = SimpleNamespace(concrete_cudagraph_entries={}, is_debugging_mode=False)
    runner = SimpleNamespace(model=wrapper)
    hooked = wrappers.restoring(
        lambda self, desc, mode: called.append(desc.num_tokens), runner, Source({4}), print
    )
    for tokens in (4, 2):
        hooked(runner, BatchDescriptor(tokens), Mode.FULL)
    (entry,) = wrapper.concrete_cudagraph_entries.values()
    assert (
        isinstance(entry, CUDAGraphEntry) and entry.cudagraph == "restored 4" and entry.output == "output 4"
    )
    assert called == [2]
    wrapper.is_debugging_mode = True
    hooked(runner, BatchDescriptor(4), Mode.FULL)
    assert called == [2, 4]
    wrapper.is_debugging_mode = False
    hooked(SimpleNamespace(model=wrapper), BatchDescriptor(4), Mode.FULL)
    assert called == [2, 4, 4]


def test_a_vllm_of_another_shape_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook.compat, "check", lambda feature, load=None: f"{feature} differ.")
    monkeypatch.setattr(hook, "_patched", lambda **_: pytest.fail("patched"))
    with pytest.raises(GraphRefusedError, match=r"graphs differ\."):
        hook.install(object(), Source(set()), print)
    with pytest.raises(GraphRefusedError, match=r"graphs differ\."):
        hook.watch(object(), print)


def test_a_hook_that_misses_a_name_is_reported_and_fails_no_import(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker = type("Worker", (), {})
    modules = {name: SimpleNamespace() for name in (*plugin.RUNNERS, plugin.aot.MODULE)}
    for name, module in {**modules, plugin.WORKER: SimpleNamespace(Worker=worker)}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(plugin.compat, "check", lambda feature, load=None: None)
    plugin.register(EngineTask(compiled=tmp_path, kv_plan=[{}], restore=tmp_path))
    reported = worker()
    assert "_try_load_aot_compiled_fn" in getattr(reported, COMPILE_REPORT)()["reasons"][0]
    assert "maybe_apply_startup_plan" in getattr(reported, plugin.KV_REPORT)()
    assert "GPUModelRunner" in getattr(reported, plugin.GRAPHS_REPORT)()["*"]


def _plan(baseline: int = 1000) -> kv_plan.KvPlan:
    return kv_plan.KvPlan(0, 700, baseline, "0.32", "one device")


FINGERPRINT = "0123456789abcdef"


@needs_vllm
def test_each_rank_leaves_its_own_plan_with_a_margin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's check is a strict comparison, and one failure changes the size on which graphs depend."""
    import vllm
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "get_device_name", classmethod(lambda *_: "H200"))
    saved: list[tuple[int, int]] = []
    module = SimpleNamespace(maybe_save_startup_plan=lambda worker, size: saved.append((worker.rank, size)))
    plugin._note_kv(tmp_path, module)
    for rank in (1, 0):
        worker = SimpleNamespace(rank=rank, init_snapshot=SimpleNamespace(free_memory=80 << 30))
        module.maybe_save_startup_plan(worker, (60 << 30) + rank)
    plans = kv_plan.collect(tmp_path)
    less = 256 << 20
    assert [(p.rank, p.kv_cache_memory_bytes, p.free_memory_baseline) for p in plans] == [
        (0, (60 << 30) - less, (80 << 30) - less), (1, (60 << 30) + 1 - less, (80 << 30) - less),
    ]  # fmt: skip
    assert {(p.vllm, p.device) for p in plans} == {(vllm.__version__, "H200")}
    assert saved == [(1, (60 << 30) + 1), (0, 60 << 30)]


@pytest.mark.parametrize("free", [1000, 999, 600, 475])
def test_what_others_hold_is_taken_off_the_plan(tmp_path: Path, free: int) -> None:
    held = json.loads(kv_plan.lay(_plan(), tmp_path, FINGERPRINT, free=free).read_text())
    assert (held["kv_cache_memory_bytes"], held["free_memory_baseline"]) == (free - 300, free)


@needs_vllm
def test_vllm_itself_takes_the_plan_and_applies_its_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker import startup_plan

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    kv_plan.lay(_plan(), tmp_path, FINGERPRINT)
    assert startup_plan._plan_path(FINGERPRINT) == str(kv_plan.path(tmp_path, FINGERPRINT))
    held = startup_plan._load_plan(FINGERPRINT)
    assert held is not None and startup_plan.PLAN_SCHEMA_VERSION == kv_plan.SCHEMA
    assert startup_plan._applicable_kv_cache_memory_bytes(held, 1000) == 700
    assert startup_plan._applicable_kv_cache_memory_bytes(held, 999) is None


@needs_vllm
def test_the_plan_follows_the_model_to_another_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's fingerprint contains the model's path; the plan is stored under the fingerprint of the worker."""
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.worker import gpu_worker, startup_plan

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setenv(kv_plan.VARIABLE, "1")
    monkeypatch.setattr(
        startup_plan, "compute_plan_fingerprint", lambda config, rank, world: f"here-{rank}-{world}"
    )
    monkeypatch.setattr(
        type(current_platform), "get_device_name", classmethod(lambda cls, device_id=0: "H200")
    )
    original = gpu_worker.maybe_apply_startup_plan
    monkeypatch.setattr(gpu_worker, "maybe_apply_startup_plan", original)
    monkeypatch.setattr(gpu_worker.Worker, KV_REPORT, None, raising=False)

    def worker(free: int, rank: int = 1) -> Any:
        return SimpleNamespace(
            vllm_config=None, rank=rank, parallel_config=SimpleNamespace(world_size=2),
            init_snapshot=SimpleNamespace(free_memory=free), cache_config=SimpleNamespace(kv_cache_memory_bytes=None),
        )  # fmt: skip

    plan = {"rank": 0, "kv_cache_memory_bytes": 500, "free_memory_baseline": 800,
            "vllm": vllm.__version__, "device": "H200"}  # fmt: skip
    plans = [plan, plan | {"rank": 1, "kv_cache_memory_bytes": 700, "free_memory_baseline": 1000}]

    def applied(plans: Any, one: Any) -> tuple[int | None, str | None]:
        gpu_worker.maybe_apply_startup_plan = original
        plugin._apply_kv(plans, gpu_worker)
        gpu_worker.maybe_apply_startup_plan(one)
        return one.cache_config.kv_cache_memory_bytes, getattr(gpu_worker.Worker, KV_REPORT)(one)

    size, reason = applied(plans, worker(474))
    assert size is None and "rank 1 has 474 bytes free" in str(reason)
    assert not list(tmp_path.rglob("*.json"))
    assert applied(plans, worker(1000)) == (700, None)
    assert [p.name for p in tmp_path.rglob("*.json")] == ["startup_plan_here-1-2.json"]
    assert applied(plans, worker(800, rank=0)) == (500, None)
    assert applied(plans, worker(700)) == (400, None)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "empty"))
    for wrong, said in (
        ([plan], "for 1 ranks, but this engine has 2"),
        ([plan | {"device": "A"}, plans[1]], "on A, this engine has"),
    ):
        size, reason = applied(wrong, worker(1 << 40, rank=0))
        assert size is None and said in str(reason)
    monkeypatch.delenv(kv_plan.VARIABLE)
    assert applied(plans, worker(1 << 40)) == (None, "vLLM's own check rejected the KV plan")
