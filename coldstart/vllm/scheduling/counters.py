"""Scheduler counters that are published in vLLM's /metrics.

Invariant: counters never decrease, and the queue lengths add up to the number of unfinished requests. The API server
collects the values from the engine process through prometheus_client's multiprocess directory, which must be set before
the engine starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

PREFIX = "coldstart_scheduler_"


@dataclass
class SchedulerTotals:
    """Totals since the scheduler started. vLLM itself counts the transferred bytes (`vllm:kv_offload_*`).

    `blocks_evicted` counts the GPU blocks freed by evictions, which need no copy because full blocks are already stored.
    """

    evictions: int = 0
    loads: int = 0
    blocks_evicted: int = 0
    demotions: int = 0
    promotions: int = 0
    parks: int = 0


class PrometheusExporter:
    """Publisher of counters and queue lengths to Prometheus."""

    def __init__(self) -> None:
        self._gauges = {field.name: _create_gauge(field.name) for field in fields(SchedulerTotals)}
        self._queue_length = _create_gauge("queue_length", ("level",))
        self._published: dict[str, float] = {}

    def publish(self, counters: SchedulerTotals, levels: Sequence[int]) -> None:
        # Setting a gauge writes to a mapped file, and most counters rarely change.
        for name, value in vars(counters).items():
            if self._published.get(name) != value:
                self._published[name] = value
                self._gauges[name].set(value)
        for level, length in enumerate(levels, start=1):
            self._queue_length.labels(level=str(level)).set(length)


def _create_gauge(name: str, labels: tuple[str, ...] = ()) -> Any:
    from prometheus_client import Gauge

    return Gauge(PREFIX + name, f"Scheduler: {name}.", labels, multiprocess_mode="livesum")
