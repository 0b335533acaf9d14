"""The worker that copies blocks between two real pools."""

import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from coldstart.vllm.scheduling import kv_transfer_config
from coldstart.vllm.scheduling.offload import CpuPoolWorker


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
    extra = kv_transfer_config(1 << 30, on_cpu=True, evicts=True)["kv_connector_extra_config"]
    assert extra["offload_prompt_only"] is False and extra["spec_name"] == "CpuPoolOffloadingSpec"
    assert (
        "spec_name"
        not in kv_transfer_config(1 << 30, on_cpu=False, evicts=False)["kv_connector_extra_config"]
    )


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
