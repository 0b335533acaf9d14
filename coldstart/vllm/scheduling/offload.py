"""KV of preempted requests on the host: vLLM's offloading connector, and its worker for the CPU platform.

The worker has two real pools and a copying thread per direction. Invariants: the copies of one direction run in the order of
submission. `wait` returns only after the named jobs have finished. A copy releases the interpreter lock (memmove); a torch copy
would start an OpenMP team on the cores that compute.
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
    """vLLM's connector with the limits that our scheduler sets; vLLM asks it before each admission.

    A request in `load_only` may start a load but is never admitted to compute. `hits` are the latest answers by request id: if
    the host has evicted a hit, the request becomes ready to compute again instead of waiting forever. `away` has the evicted
    requests that neither run nor load yet.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.hits: dict[str, int] = {}
        self.load_only: set[str] = set()
        self.away: dict[str, Request] = {}

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the tokens that a load would bring, and whether it is asynchronous; None if vLLM must ask again later."""
        # Always ask the host: until its answer is not None, stores of this request still read its blocks.
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if tokens is not None:
            # Newer than the value of find_hit(): both the local prefix cache and the host's change in between.
            self.hits[request.request_id] = tokens
        if request.request_id not in self.load_only or is_async:
            return tokens, is_async
        return None, False

    def find_hit(self, request: Request, manager: Any) -> int | None:
        """Return the tokens that a load would bring beyond the local prefix cache; None if the answer is not known yet."""
        if request.request_id not in self.hits:
            tokens, _ = super().get_num_new_matched_tokens(request, manager.get_computed_blocks(request)[1])
            if tokens is None:
                return None
            self.hits[request.request_id] = tokens
        return self.hits[request.request_id]

    def record_eviction(self, request: Request) -> None:
        """Record that the request was evicted."""
        self.hits.pop(request.request_id, None)
        self.away[request.request_id] = request

    def forget(self, request_id: str) -> None:
        """Record that the request runs again, loads, or has finished."""
        self.hits.pop(request_id, None)
        self.away.pop(request_id, None)


class HostPool:
    """Anonymous memory in parts of `chunks` pages of `page` bytes, each allocated at first use.

    vLLM's scheduler computes the number of chunks from the first stage of a pipeline. A stage with more layers has fewer chunks
    in the same number of bytes, and then needs further parts.
    """

    def __init__(self, chunks: int, page: int) -> None:
        self._chunks, self._page = max(1, chunks), page
        self._parts: list[int] = []
        self._memory: list[mmap.mmap] = []

    def locate(self, chunk: int) -> int:
        """Return the address of a chunk."""
        part, place = divmod(chunk, self._chunks)
        while part >= len(self._parts):
            memory = mmap.mmap(-1, self._chunks * self._page)
            self._memory.append(memory)
            self._parts.append(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
        return self._parts[part] + place * self._page


class CpuPoolWorker(OffloadingWorker):
    """Copies whole blocks between vLLM's KV tensors and the host pools of one rank, one thread per direction."""

    def __init__(self, kv_caches: CanonicalKVCaches, chunks: int) -> None:
        tensors = kv_caches.tensors
        self._device = [(t.tensor.data_ptr(), t.tensor.stride(0), t.page_size_bytes) for t in tensors]
        self._host = [HostPool(chunks, page) for _, _, page in self._device]
        # A tensor can appear in several references of one group; copy it once.
        self._tensors = [sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs]
        self._keep = kv_caches
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
            done = [job_id for job_id, future in self._running.items() if future.done()]
            return [self._running.pop(job_id).result() for job_id in done]

    def wait(self, job_ids: set[int]) -> None:
        with self._lock:
            futures = [self._running[job_id] for job_id in job_ids if job_id in self._running]
        for future in futures:
            future.result()

    def shutdown(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=True)

    def _submit(self, way: str, job_id: int, device: GPULoadStoreSpec, host: LoadStoreSpec) -> bool:
        if not isinstance(host, BlockIDsLoadStoreSpec):
            raise TypeError(f"unexpected host location {type(host).__name__}")
        pages = list(self._pages(device.block_ids.tolist(), device.group_sizes, host.block_ids.tolist()))
        future = self._threads[way].submit(self._copy, job_id, pages, way == "store")
        with self._lock:
            self._running[job_id] = future
        return True

    def _pages(self, blocks: list[int], sizes: Sequence[int], chunks: list[int]) -> Pages:
        """Yield (device address, host address, bytes) of every page of a transfer."""
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
        moved = sum(size for _, _, size in pages)
        return TransferResult(job_id, True, moved, time.perf_counter() - start)


class CpuPoolOffloadingSpec(CPUOffloadingSpec):
    """vLLM's own manager with our worker. Raises ValueError for chunks of several blocks."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        if self.blocks_per_chunk != 1:
            raise ValueError("the CPU pools move single blocks: omit block_size and blocks_per_chunk")
        self._pools: CpuPoolWorker | None = None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._pools is None:
            self._pools = CpuPoolWorker(kv_caches, self.num_chunks)
        return self._pools
