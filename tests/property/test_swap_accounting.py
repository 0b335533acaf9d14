"""Bytes moved between two real pools equal the bytes of the decisions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

from coldstart.system import timeline
from coldstart.vllm.scheduling.offload import CpuPoolWorker
from coldstart.vllm.scheduling.scheduler import PolicyScheduler
from tests.support.scheduling.engine_double import BLOCK, EngineDouble, Shape, build, expected, make_request

PAGE = 2 * BLOCK * 8 * 4
"""Keys and values of one head of 8 float32 numbers, by the double's cache specification."""


def real_pools(shape: Shape) -> tuple[EngineDouble, CpuPoolWorker]:
    """Return the double with its cells in a tensor and with our worker instead of vLLM's CPU worker."""
    engine = EngineDouble(build(shape, PolicyScheduler), shape)
    pool = torch.zeros((shape.blocks, PAGE // 8), dtype=torch.int64)
    engine.ranks[0].cells = pool.numpy()[:, :BLOCK]  # type: ignore[assignment]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(pool.view(torch.int8), PAGE)], [[CanonicalKVCacheRef(0, PAGE)]]
    )
    assert engine.worker is not None
    worker = engine.worker.worker = CpuPoolWorker(caches, chunks=600)
    return engine, worker


def watched(worker: CpuPoolWorker) -> dict[str, int]:
    """Count the blocks that the worker copies each way."""
    asked = {"store": 0, "load": 0}
    submit = worker._submit

    def counting(way: str, job_id: int, device: Any, host: Any) -> bool:
        asked[way] += len(device.block_ids)
        return submit(way, job_id, device, host)

    worker._submit = counting  # type: ignore[method-assign]
    return asked


@pytest.mark.parametrize("shared", [0, 8])
def test_bytes_moved_are_the_bytes_decided(
    shared: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(timeline.EVENTS_VARIABLE, str(tmp_path / "events"))
    shape = Shape(batch=2, blocks=20, host_blocks=600, settings={"alpha_s": 0.1, "alpha_scale": 0.0})
    engine, worker = real_pools(shape)
    asked = watched(worker)
    prompts = {f"r{i}": [*range(shared), *range(100 * i, 100 * i + 11)] for i in range(1, 7)}
    for name, prompt in prompts.items():
        engine.add(make_request(name, prompt, 30))
    while engine.scheduler.has_requests():
        engine.step()
    for _ in range(4):
        engine.step()
    assert engine.outputs == {name: expected(prompt, 30) for name, prompt in prompts.items()}
    counters = engine.scheduler.counters
    assert counters.loads and 0 < counters.loading_s <= counters.blocked_on_loads_s
    assert (counters.bytes_out, counters.bytes_in) == (asked["store"] * PAGE, asked["load"] * PAGE)
    assert (counters.bytes_out_moved, counters.bytes_in_moved) == (counters.bytes_out, counters.bytes_in)
    phases = timeline.Timeline.read(tmp_path / "events").spans
    told = {
        name: sum(int(s.args["bytes"]) for s in phases if s.name == name) for name in ("swap out", "swap in")
    }
    assert told == {"swap out": counters.bytes_out, "swap in": counters.bytes_in}
    worker.shutdown()


def test_without_a_timeline_nothing_is_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(timeline.EVENTS_VARIABLE, raising=False)
    scheduler = build(Shape(), PolicyScheduler)
    assert scheduler.events is None and scheduler.ranking.observer is None
