"""KV plans of the ranks of a GPU, where vLLM notes and applies its own start-up plan."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coldstart.vllm.graphs import kv_plan, plugin

vllm = pytest.importorskip("vllm")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "get_device_name", classmethod(lambda *_: "H200"))


@pytest.mark.usefixtures("device")
def test_each_rank_leaves_its_own_plan_with_a_margin(tmp_path: Path) -> None:
    """vLLM's check is a strict comparison, and one failure changes the size on which graphs depend."""
    saved: list[tuple[int, int]] = []
    module = SimpleNamespace(maybe_save_startup_plan=lambda worker, size: saved.append((worker.rank, size)))
    plugin._note_kv(tmp_path, module)
    for rank in (1, 0):
        worker = SimpleNamespace(rank=rank, init_snapshot=SimpleNamespace(free_memory=80 << 30))
        module.maybe_save_startup_plan(worker, (60 << 30) + rank)
    plans, less = kv_plan.read_plans(tmp_path), 256 << 20
    assert [(p.rank, p.kv_cache_memory_bytes, p.free_memory_baseline) for p in plans] == [
        (0, (60 << 30) - less, (80 << 30) - less), (1, (60 << 30) + 1 - less, (80 << 30) - less),
    ]  # fmt: skip
    assert {(p.vllm, p.device) for p in plans} == {(vllm.__version__, "H200")}
    assert saved == [(1, (60 << 30) + 1), (0, 60 << 30)]


@pytest.mark.usefixtures("device")
def test_each_rank_gets_its_size_where_vllm_applies_its_own_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other processes hold is taken off the plan, unless less than a quarter of it would remain."""
    from vllm.v1.worker import gpu_worker

    original = gpu_worker.maybe_apply_startup_plan
    monkeypatch.setattr(gpu_worker, "maybe_apply_startup_plan", original)
    plan = {"rank": 0, "kv_cache_memory_bytes": 500, "free_memory_baseline": 800,
            "vllm": vllm.__version__, "device": "H200"}  # fmt: skip
    plans = [plan, plan | {"rank": 1, "kv_cache_memory_bytes": 700, "free_memory_baseline": 1000}]

    def applied(plans: Any, free: int, rank: int = 1, given: int | None = None) -> tuple[int | None, str]:
        worker = SimpleNamespace(
            vllm_config=None, rank=rank, parallel_config=SimpleNamespace(world_size=2),
            init_snapshot=SimpleNamespace(free_memory=free),
            cache_config=SimpleNamespace(kv_cache_memory_bytes=given),
        )  # fmt: skip
        gpu_worker.maybe_apply_startup_plan = original
        monkeypatch.setattr(plugin.compat, "fallbacks", [])
        plugin._apply_kv(plans, gpu_worker)
        gpu_worker.maybe_apply_startup_plan(worker)
        return worker.cache_config.kv_cache_memory_bytes, "; ".join(
            one.reason for one in plugin.compat.fallbacks
        )

    for free, rank, size in ((1000, 1, 700), (800, 0, 500), (999, 1, 699), (700, 1, 400), (475, 1, 175)):
        assert applied(plans, free, rank) == (size, "")
    assert applied(plans, 1, given=9) == (9, "")
    for wrong, free, rank, said in (
        (plans, 474, 1, "on rank 1: 474 bytes are free"),
        ([plan], 1 << 40, 0, "for 1 ranks, but this engine has 2"),
        ([plan | {"device": "A"}, plans[1]], 1 << 40, 0, "on A, but this engine has"),
    ):
        size, reason = applied(wrong, free, rank)
        assert size is None and said in reason
