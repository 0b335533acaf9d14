"""The hook's integration points on the installed vLLM, its logic on fakes, and KV plans with vLLM's check."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coldstart.contract.graphs import EngineTask
from coldstart.graphs.errors import AlteredTableError, GraphRefusedError
from coldstart.vllm.graphs import hooks, kv_plan, plugin
from coldstart.vllm.graphs.hooks import graph_key
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


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin.compat, "sources", [])
    monkeypatch.setattr(plugin.compat, "fallbacks", [])


def _restored(*sizes: int) -> dict[str, str]:
    return {f"FULL:num_tokens={size},num_ubatches=1": f"restored {size}" for size in sizes}


@dataclass
class Manager:
    _capture_descs: dict[Mode, list[Descriptor]]
    graphs: dict[Descriptor, Any] = field(default_factory=dict)
    hidden_states: Any = None
    _max_full_descs_to_capture: int | None = None
    _candidates: dict[Any, list[Descriptor]] = field(default_factory=dict)

    def capture(self, create_forward_fn: Any, progress_bar_desc: str = "") -> None:
        for rows in self._capture_descs.values():
            for row in rows:
                create_forward_fn(row, warmup=True)
                create_forward_fn(row, warmup=False)
                self.graphs[row] = f"captured {row.num_tokens}"


def _forward(descriptor: Any, warmup: bool) -> None:
    """Prepare nothing."""


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hooks find the manager of this test."""
    monkeypatch.setitem(sys.modules, hooks.MODULE, SimpleNamespace(CudaGraphManager=Manager))
    monkeypatch.setattr(hooks, "require", lambda: None)


def _runner(manager: Any) -> Any:
    return SimpleNamespace(cudagraph_manager=manager)


def _manager() -> Manager:
    full = [Descriptor(Mode.FULL, n) for n in (4, 2, 1)]
    return Manager({Mode.FULL: full, Mode.PIECEWISE: [Descriptor(Mode.PIECEWISE, 8)]})


@pytest.mark.usefixtures("capturing")
def test_the_manager_gets_restored_graphs_and_captures_the_rest() -> None:
    """A restored piece would read the bundle's pool, while the captured piece before it writes another one."""
    manager, graphs = _manager(), _restored(4, 8)
    with hooks.hooked(_runner(manager), partial(hooks.capture_rest, manager, graphs)):
        manager.capture(_forward)
    found = {(d.cg_mode.name, d.num_tokens): g for d, g in manager.graphs.items()}
    assert found == {
        ("FULL", 4): "restored 4", ("FULL", 2): "captured 2", ("FULL", 1): "captured 1",
        ("PIECEWISE", 8): "captured 8",
    }  # fmt: skip
    assert [d.num_tokens for d in manager._capture_descs[Mode.FULL]] == [4, 2, 1]
    assert set(captured_graphs(_runner(manager))) == {
        graph_key(d) for d in manager.graphs if d.cg_mode is Mode.FULL
    }


def _fail(*_: object) -> None:
    pytest.fail("not called for this capture")


@needs_vllm
def test_a_draft_models_manager_captures_its_own_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft manager inherits `capture`, and its descriptors have the keys of the target."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager

    assert issubclass(SpeculatorCudaGraphManager, CudaGraphManager)
    draft = SpeculatorCudaGraphManager.__new__(SpeculatorCudaGraphManager)
    vars(draft).update(vars(_manager()))
    monkeypatch.setattr(CudaGraphManager, "capture", Manager.capture)
    with hooks.hooked(_runner(_manager()), _fail):
        CudaGraphManager.capture(draft, _forward)  # as its own method does
    assert set(draft.graphs.values()) == {"captured 4", "captured 2", "captured 1", "captured 8"}


@pytest.mark.usefixtures("capturing")
def test_memory_profiling_captures_as_always() -> None:
    manager = _manager()
    manager._max_full_descs_to_capture = 2
    with hooks.hooked(_runner(manager), _fail):
        manager.capture(_forward)
    assert len(manager.graphs) == 4


def test_keys_tell_descriptors_apart() -> None:
    one, other = Descriptor(Mode.FULL, 4), Descriptor(Mode.FULL, 4, num_reqs=4)
    assert graph_key(one) == "FULL:num_tokens=4,num_ubatches=1"
    assert len({graph_key(replace(d, cg_mode=mode)) for d in (one, other) for mode in Mode}) == 4


@needs_vllm
def test_the_hook_is_gone_after_the_block() -> None:
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    before = CudaGraphManager.capture
    with hooks.hooked(object(), _fail):
        assert CudaGraphManager.capture is not before
    assert CudaGraphManager.capture is before


@needs_vllm
def test_a_vllm_of_another_shape_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = SimpleNamespace(CudaGraphManager=type("Renamed", (), {}))
    monkeypatch.setitem(sys.modules, hooks.MODULE, renamed)
    with pytest.raises(GraphRefusedError, match=r"lacks an integration point of graphs: .*capture"):
        hooks.hooked(object(), _fail).__enter__()
    monkeypatch.setattr(hooks.compat, "check", lambda feature, load=None: f"{feature} differ.")
    with pytest.raises(GraphRefusedError, match=r"graphs differ\."):
        hooks.refuse_unsupported(object())
    assert not hasattr(renamed.CudaGraphManager, "capture")


def test_a_hook_that_misses_a_name_is_reported_and_fails_no_import(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker = type("Worker", (), {})
    modules = {name: SimpleNamespace() for name in (*plugin.RUNNERS, plugin.compiled.DECORATORS)}
    for name, module in {**modules, plugin.WORKER: SimpleNamespace(Worker=worker)}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(plugin.compat, "check", lambda feature, load=None: None)
    plugin.register(EngineTask(compiled=tmp_path, kv_plan=[{}], restore=tmp_path))
    reasons = {one["section"]: one["reason"] for one in plugin.compat.report()["fallbacks"]}
    assert "_try_load_aot_compiled_fn" in reasons["compile"]
    assert "maybe_apply_startup_plan" in reasons["kv"] and "GPUModelRunner" in reasons["graphs"]


@pytest.mark.parametrize(
    ("task", "section"),
    [
        (EngineTask(kv_plan=[{}]), "kv-plan"),
        (EngineTask(kv_note=Path("/noted")), "kv-plan"),
        (EngineTask(compiled=Path("/none")), "aot"),
    ],
)
def test_server_reports_what_this_vllm_does_not_support(
    monkeypatch: pytest.MonkeyPatch, task: EngineTask, section: str
) -> None:
    monkeypatch.setattr(plugin.compat, "check", lambda feature, load=None: f"{feature} is gone.")
    monkeypatch.setattr(plugin.late, "when_imported", lambda *_: pytest.fail("hooked"))
    plugin.register(task)
    assert [one["reason"] for one in plugin.compat.report()["fallbacks"]] == [f"{section} is gone."]


def _plan(baseline: int = 1000) -> kv_plan.KvPlan:
    return kv_plan.KvPlan(0, 700, baseline, "0.32", "one device")


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
def test_what_others_hold_is_taken_off_the_plan(free: int) -> None:
    assert _plan().fit(free) == free - 300


def test_much_less_free_memory_means_profiling() -> None:
    with pytest.raises(GraphRefusedError, match="profiles again"):
        _plan().fit(474)


@needs_vllm
def test_each_rank_gets_its_size_where_vllm_applies_its_own_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.worker import gpu_worker

    monkeypatch.setattr(
        type(current_platform), "get_device_name", classmethod(lambda cls, device_id=0: "H200")
    )
    original = gpu_worker.maybe_apply_startup_plan
    monkeypatch.setattr(gpu_worker, "maybe_apply_startup_plan", original)

    def worker(free: int, rank: int = 1, given: int | None = None) -> Any:
        return SimpleNamespace(
            vllm_config=None, rank=rank, parallel_config=SimpleNamespace(world_size=2),
            init_snapshot=SimpleNamespace(free_memory=free),
            cache_config=SimpleNamespace(kv_cache_memory_bytes=given),
        )  # fmt: skip

    plan = {"rank": 0, "kv_cache_memory_bytes": 500, "free_memory_baseline": 800,
            "vllm": vllm.__version__, "device": "H200"}  # fmt: skip
    plans = [plan, plan | {"rank": 1, "kv_cache_memory_bytes": 700, "free_memory_baseline": 1000}]

    def applied(plans: Any, one: Any) -> tuple[int | None, str | None]:
        gpu_worker.maybe_apply_startup_plan = original
        plugin._apply_kv(plans, gpu_worker)
        plugin.compat.fallbacks.clear()
        gpu_worker.maybe_apply_startup_plan(one)
        reasons = [one.reason for one in plugin.compat.fallbacks]
        return one.cache_config.kv_cache_memory_bytes, "; ".join(reasons) or None

    size, reason = applied(plans, worker(474))
    assert size is None and "rank 1 has 474 bytes free" in str(reason)
    assert applied(plans, worker(1000)) == (700, None)
    assert applied(plans, worker(800, rank=0)) == (500, None)
    assert applied(plans, worker(700)) == (400, None)
    assert applied(plans, worker(1, given=9)) == (9, None)
    for wrong, said in (
        ([plan], "for 1 ranks, but this engine has 2"),
        ([plan | {"device": "A"}, plans[1]], "on A, but this engine has"),
    ):
        size, reason = applied(wrong, worker(1 << 40, rank=0))
        assert size is None and said in str(reason)


@pytest.mark.parametrize("data", [None, {}, [{"rank": 1}], []])
def test_invalid_plan_is_refused(data: object) -> None:
    with pytest.raises(AlteredTableError):
        kv_plan.parse_plans(data)
