"""What moves between the device and the host: decided by the scheduler, and reported by the workers.

Invariant: bytes decided = sum over transfers and groups of blocks * layers * page size; once every transfer has
landed, the bytes reported equal the bytes decided.
"""

from __future__ import annotations

from typing import Any

from coldstart.machine import timeline
from coldstart.vllm.scheduling.counters import KvCounters
from coldstart.vllm.scheduling.events import Events


class Swaps:
    """Reads vLLM's own offloading metadata; other connectors' is left alone."""

    def __init__(self, counters: KvCounters, kv_cache_config: Any, ranks: int, events: Events | None) -> None:
        groups = kv_cache_config.kv_cache_groups
        self._bytes = [ranks * len(g.layer_names) * g.kv_cache_spec.page_size_bytes for g in groups]
        self._counters, self._events = counters, events
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
