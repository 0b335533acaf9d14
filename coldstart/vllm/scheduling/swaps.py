"""What moves between the device and the host: decided by the scheduler, and reported by the workers.

Invariant: bytes decided = sum over transfers and groups of blocks * bytes of a block on all ranks; once every transfer
has landed on every rank, the bytes reported equal the bytes decided.
"""

from __future__ import annotations

from typing import Any

from coldstart.system import timeline
from coldstart.vllm.scheduling.counters import Counters
from coldstart.vllm.scheduling.events import Events


class Swaps:
    """Reads vLLM's own offloading metadata; other connectors' is left alone."""

    def __init__(self, counters: Counters, sizes: list[int], events: Events | None) -> None:
        self._bytes, self._counters, self._events = sizes, counters, events
        self._loading: dict[str, tuple[float, int]] = {}

    def decided(self, metadata: Any) -> None:
        """One step's transfers, as the connector sends them to the workers."""
        for job in getattr(metadata, "store_jobs", {}).values():
            blocks, size = self._size(job.src_spec)
            self._counters.blocks_stored += blocks
            self._counters.bytes_out += size
            if self._events:
                self._events.note("swap out", request=job.req_id, bytes=size)
        for job in getattr(metadata, "load_jobs", {}).values():
            blocks, size = self._size(job.dst_spec)
            self._counters.blocks_loaded += blocks
            self._counters.bytes_in += size
            if self._events:
                self._loading[job.req_id] = (timeline.now(), size)

    def moved(self, report: Any) -> None:
        """What the workers say has landed since their last report."""
        stats = getattr(report.kv_connector_worker_meta, "transfer_stats", None)
        if stats is not None:
            self._counters.bytes_out_moved += stats.store.bytes
            self._counters.bytes_in_moved += stats.load.bytes
        if self._events:
            for request_id in report.finished_recving or ():
                if request_id in self._loading:
                    start_s, size = self._loading.pop(request_id)
                    self._events.note("swap in", start_s, request=request_id, bytes=size)

    def _size(self, spec: Any) -> tuple[int, int]:
        """Blocks and bytes of a transfer's device side."""
        each = zip(spec.group_sizes, self._bytes, strict=False)
        return sum(spec.group_sizes), sum(blocks * size for blocks, size in each)


def block_bytes(config: Any, kv_cache_config: Any) -> list[int]:
    """Bytes of one block of each group on all ranks together: a tensor-parallel rank has its heads' share of every layer of
    its stage. Exact where each group has the same share of every stage's layers.
    """
    parallel, model = config.parallel_config, config.model_config
    stages = parallel.pipeline_parallel_size
    ranks = parallel.world_size // stages
    # vLLM's scheduler is told of the first stage's layers alone.
    every, first = (
        (1, 1) if stages == 1 else (model.get_total_num_hidden_layers(), model.get_num_layers(parallel))
    )
    groups = kv_cache_config.kv_cache_groups
    return [ranks * len(g.layer_names) * every // first * g.kv_cache_spec.page_size_bytes for g in groups]
