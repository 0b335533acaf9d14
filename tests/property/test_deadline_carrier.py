"""DeadlinePolicy through vLLM's own priority queue."""

import asyncio
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from coldstart.contract.plan import LaunchPlan
from coldstart.scheduling.deadline import PRIORITY_SPAN_US
from coldstart.scheduling.settings import KEY, SchedulerSettings
from coldstart.vllm.scheduling import KEEP_HEADERS, SCHEDULER_CLS, kv_transfer_config, scheduler, settle
from coldstart.vllm.scheduling.offload import CpuPoolWorker
from coldstart.vllm.scheduling.virtual_engine import make_request

PROFILE = {"prefill": [[1, 0.01], [1000, 1.0]], "decode": [[1, 0.01]]}


def config(**settings: Any) -> SimpleNamespace:
    return SimpleNamespace(
        additional_config={KEY: {"profile": PROFILE, **settings}},
        cache_config=SimpleNamespace(num_gpu_blocks=100, block_size=16, enable_prefix_caching=True),
    )


def test_vllms_queue_orders_by_priority_and_then_by_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, tuple[int, Any]] = {}

    async def add(self: Any, name: str, *_: Any, priority: int, lora_request: Any = None) -> None:
        given[name] = (priority, lora_request)

    monkeypatch.setattr(AsyncLLM, "__init__", lambda self, kind: setattr(self, "vllm_config", kind))
    monkeypatch.setattr(AsyncLLM, "add_request", add)
    wanted = config(policy="deadline")
    client = settle.choose_engine_client(wanted, LaunchPlan([]))(wanted)
    rows = [("long", 900, 0), ("short", 5, 0), ("late", 5, 1), ("first", 900, -1)]
    for name, tokens, own in rows:
        prompt = {"type": "token", "prompt_token_ids": list(range(tokens))}
        asyncio.run(client.add_request(name, prompt, None, priority=own, lora_request=f"adapter of {name}"))
    assert {name: lora for name, (_, lora) in given.items()} == {
        row[0]: f"adapter of {row[0]}" for row in rows
    }
    init_none_hash(sha256)
    queue = create_request_queue(SchedulingPolicy.PRIORITY)
    for name, tokens, _ in rows:
        queue.add_request(make_request(name, list(range(tokens)), 1, 16, given[name][0]))
    assert [queue.pop_request().request_id for _ in rows] == ["first", "short", "long", "late"]


def test_the_class_of_a_key_or_a_header_counts_for_a_request_without_a_priority(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = list[int]()

    async def add(self: Any, name: str, *_: Any, priority: int) -> None:
        given.append(priority)

    monkeypatch.setattr(AsyncLLM, "__init__", lambda self, kind: setattr(self, "vllm_config", kind))
    monkeypatch.setattr(AsyncLLM, "add_request", add)
    (tmp_path / "key").write_text("secret")
    file = tmp_path / "classes.toml"
    file.write_text('[a]\npriority = -5\nheader = "X-Class: a"\n[b]\npriority = 7\nkey_file = "key"\n')
    wanted = config(policy="deadline", classes=str(file))
    client = settle.choose_engine_client(wanted, LaunchPlan([]))(wanted)

    async def ask(scope: Any, receive: Any, send: Any) -> None:
        # As vLLM's endpoints do, some of them in a task of their own.
        await asyncio.create_task(client.add_request("a", None, None, priority=receive))

    served = resolve_name(KEEP_HEADERS)(ask)
    by_key, by_header = (b"authorization", b"Bearer secret"), (b"x-class", b"a")
    for found, own in (([by_key], 0), ([by_header], 0), ([], 0), ([by_key], 3), ([by_header], -9)):
        asyncio.run(served({"type": "http", "headers": found}, own, None))
    assert [round(priority / PRIORITY_SPAN_US) for priority in given] == [7, -5, 0, 3, -9]


def incompatible(connector: str | None = None, **changes: object) -> SimpleNamespace:
    fields = {"policy": "fcfs", "enable_chunked_prefill": True} | changes
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(**fields),
        kv_transfer_config=connector and SimpleNamespace(kv_connector=connector),
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"policy": "priority"}, "scheduling-policy priority"),
        ({"enable_chunked_prefill": False}, "chunked-prefill"),
        ({"prefill_schedule_interval": 2}, "prefill-schedule-interval"),
        ({"connector": "OffloadingConnector"}, "the KV connector OffloadingConnector"),
    ],
)
def test_unsupported_configuration_is_named(change: dict[str, object], words: str | None) -> None:
    found = scheduler.find_unsupported(incompatible(**change))  # type: ignore[arg-type]
    assert found is None if words is None else words in (found or "")


def test_settings_survive_the_command_line() -> None:
    settings = SchedulerSettings(batch=4, alpha_s=1.5, profile={"prefill": [[1, 0.1]], "decode": [[1, 0.1]]})
    assert SchedulerSettings.from_additional_config(settings.build_additional_config()) == settings
    assert settings.get_iteration_profile().shortest_iteration_s == 0.1
    assert SchedulerSettings.from_additional_config({}) == SchedulerSettings()
    with pytest.raises(ValueError, match=r"Expected `int`, got `str` - at `\$.eta`"):
        SchedulerSettings.from_additional_config({KEY: {"eta": "2"}})
    assert SCHEDULER_CLS.endswith("PolicyScheduler")


def worker(layers: int = 2, blocks: int = 6, page: int = 64) -> tuple[CpuPoolWorker, list[torch.Tensor]]:
    tensors = [torch.zeros((blocks, page), dtype=torch.int8) for _ in range(layers)]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, page) for tensor in tensors],
        [[CanonicalKVCacheRef(i, page) for i in range(layers)]],
    )
    return CpuPoolWorker(caches, chunks=8), tensors


def device_blocks(*blocks: int) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(list(blocks), [len(blocks)], [0])


def test_blocks_come_back_as_they_left() -> None:
    copier, tensors = worker()
    for number, tensor in enumerate(tensors):
        tensor.copy_(torch.arange(6 * 64).reshape(6, 64) % 100 + number)
    before = [tensor.clone() for tensor in tensors]
    copier.submit_store(1, device_blocks(4, 2), CPULoadStoreSpec([7, 0]))
    copier.wait({1})
    for tensor in tensors:
        tensor.zero_()
    copier.submit_load(2, CPULoadStoreSpec([0, 7]), device_blocks(2, 4))
    copier.wait({2})
    results = {result.job_id: result for result in copier.get_finished()}
    assert set(results) == {1, 2} and all(result.transfer_size == 2 * 2 * 64 for result in results.values())
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[[2, 4]], old[[2, 4]])
        assert not tensor[[0, 1, 3, 5]].any()
    assert copier.get_finished() == []
    copier.shutdown()


def test_decode_kv_is_kept_and_the_spec_is_ours_on_the_cpu_only() -> None:
    extra = kv_transfer_config(1 << 30, on_cpu=True)["kv_connector_extra_config"]
    assert extra["offload_prompt_only"] is False and extra["spec_name"] == "CpuPoolOffloadingSpec"
    assert "spec_name" not in kv_transfer_config(1 << 30, on_cpu=False)["kv_connector_extra_config"]


def test_waiting_for_an_unknown_job_returns() -> None:
    copier, _ = worker()
    copier.wait({99})
    with pytest.raises(TypeError, match="host location"):
        copier.submit_store(1, device_blocks(0), object())  # type: ignore[arg-type]


def test_a_stage_with_more_layers_keeps_the_chunks_that_the_scheduler_names() -> None:
    """This stage has 8 chunks for its layers; the scheduler counts more by the layers of the first stage."""
    copier, tensors = worker()
    for tensor in tensors:
        tensor.copy_(torch.arange(6 * 64).reshape(6, 64) % 100)
    before = tensors[0].clone()
    for job, (block, chunk) in enumerate([(1, 7), (2, 8), (3, 25)]):
        copier.submit_store(job, device_blocks(block), CPULoadStoreSpec([chunk]))
    copier.wait({0, 1, 2})
    for tensor in tensors:
        tensor.zero_()
    copier.submit_load(3, CPULoadStoreSpec([7, 8, 25]), device_blocks(1, 2, 3))
    copier.wait({3})
    assert all(torch.equal(tensor[1:4], before[1:4]) for tensor in tensors)
    copier.shutdown()
