"""Offload the KV cache of preempted requests to host memory, with vLLM's offloading connector and a worker for the CPU.

The worker copies between the device and host pools with one thread per direction. Invariants: copies in one direction run
in order of submission, and `wait` returns only after the given jobs have finished. Copies use memmove, which releases the
GIL; a torch copy would start OpenMP threads on the cores that run the model.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.request import Request

Pages = Iterator[tuple[int, int, int]]


class PolicyOffloadingConnector(OffloadingConnector):
    """vLLM's offloading connector, which vLLM queries before each admission and which PolicyScheduler restricts.

    Requests in `load_only` may start a load, but are not admitted. `hits` maps a request ID to the latest number of
    loadable tokens; if the host has evicted them, the request is recomputed instead of waiting forever. `evicted` are the
    evicted requests that neither run nor load.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.hits: dict[str, int] = {}
        self.load_only: set[str] = set()
        self.evicted: dict[str, Request] = {}

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the number of loadable tokens (None: retry later), and whether the load is asynchronous."""
        # Always query the host: as long as it returns None, stores of this request still read its blocks.
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if tokens is not None:
            # This value is newer than that of find_hit(): the prefix caches may have changed since.
            self.hits[request.request_id] = tokens
        if request.request_id not in self.load_only or is_async:
            return tokens, is_async
        return None, False

    def find_hit(self, request: Request, manager: Any) -> int | None:
        """Return the number of loadable tokens beyond the local prefix cache, or None if it is not known yet."""
        if request.request_id not in self.hits:
            tokens, _ = super().get_num_new_matched_tokens(request, manager.get_computed_blocks(request)[1])
            if tokens is None:
                return None
            self.hits[request.request_id] = tokens
        return self.hits[request.request_id]

    def record_eviction(self, request: Request) -> None:
        """Record that a request was evicted."""
        self.hits.pop(request.request_id, None)
        self.evicted[request.request_id] = request

    def discard(self, request_id: str) -> None:
        """Forget that a request was evicted, because it runs again, is being loaded, or has finished."""
        self.hits.pop(request_id, None)
        self.evicted.pop(request_id, None)


class HostPool:
    """Host memory in segments of `chunks` pages of `page` bytes, which are allocated when first used.

    vLLM computes the number of chunks from the first pipeline stage. In a stage with more layers, fewer chunks fit into
    the same number of bytes, so the stage needs additional segments.
    """

    def __init__(self, chunks: int, page: int) -> None:
        self._chunks, self._page = max(1, chunks), page
        self._segment_addresses: list[int] = []
        self._memory: list[mmap.mmap] = []

    def locate(self, chunk: int) -> int:
        """Return the address of a chunk in this process."""
        segment, index = divmod(chunk, self._chunks)
        while segment >= len(self._segment_addresses):
            memory = mmap.mmap(-1, self._chunks * self._page)
            self._memory.append(memory)
            self._segment_addresses.append(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
        return self._segment_addresses[segment] + index * self._page


class CpuPoolWorker(OffloadingWorker):
    """Worker that copies blocks between vLLM's KV tensors and one rank's host pools, with one thread for each direction."""

    def __init__(self, kv_caches: CanonicalKVCaches, chunks: int) -> None:
        tensors = kv_caches.tensors
        self._device = [(t.tensor.data_ptr(), t.tensor.stride(0), t.page_size_bytes) for t in tensors]
        self._host = [HostPool(chunks, page) for _, _, page in self._device]
        # A tensor can appear in several references of one group; copy it once.
        self._tensors = [sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs]
        self._kv_caches = kv_caches
        self._threads = {name: ThreadPoolExecutor(1, f"kv-{name}") for name in ("store", "load")}
        self._lock = threading.Lock()
        self._running: dict[int, Future[TransferResult]] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._submit("store", job_id, src_spec, dst_spec)

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        # vLLM 0.33 can expedite a load; here loads have a thread of their own and their order is an invariant.
        return self._submit("load", job_id, dst_spec, src_spec)

    def get_finished(self) -> list[TransferResult]:
        with self._lock:
            finished = [job_id for job_id, future in self._running.items() if future.done()]
            return [self._running.pop(job_id).result() for job_id in finished]

    def wait(self, job_ids: set[int]) -> None:
        with self._lock:
            futures = [self._running[job_id] for job_id in job_ids if job_id in self._running]
        for future in futures:
            future.result()

    def shutdown(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=True)

    def _submit(self, direction: str, job_id: int, device: GPULoadStoreSpec, host: LoadStoreSpec) -> bool:
        if not isinstance(host, BlockIDsLoadStoreSpec):
            raise TypeError(f"unexpected host location {type(host).__name__}")
        pages = list(self._pages(device.block_ids.tolist(), device.group_sizes, host.block_ids.tolist()))
        future = self._threads[direction].submit(self._copy, job_id, pages, direction == "store")
        with self._lock:
            self._running[job_id] = future
        return True

    def _pages(self, blocks: list[int], sizes: Sequence[int], chunks: list[int]) -> Pages:
        """Yield (device address, host address, size in bytes) for each page of a transfer."""
        position = 0
        for group, size in enumerate(sizes):
            for block, chunk in zip(blocks[position:][:size], chunks[position:][:size], strict=True):
                for index in self._tensors[group]:
                    base, stride, page = self._device[index]
                    yield base + block * stride, self._host[index].locate(chunk), page
            position += size

    def _copy(self, job_id: int, pages: list[tuple[int, int, int]], store: bool) -> TransferResult:
        start = time.perf_counter()
        for device, host, size in pages:
            ctypes.memmove(*((host, device) if store else (device, host)), size)
        copied_bytes = sum(size for _, _, size in pages)
        return TransferResult(job_id, True, copied_bytes, time.perf_counter() - start)


class CpuPoolOffloadingSpec(CPUOffloadingSpec):
    """vLLM's CPU offloading with CpuPoolWorker as the worker. Raises ValueError if a chunk has more than one block."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        if self.blocks_per_chunk != 1:
            raise ValueError(
                "KV offloading of a CPU engine supports only chunks of one block; omit block_size and blocks_per_chunk"
            )
        self._pools: CpuPoolWorker | None = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._pools is None:
            self._pools = CpuPoolWorker(kv_caches, self.num_chunks)
        return self._pools
