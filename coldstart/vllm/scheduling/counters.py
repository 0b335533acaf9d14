"""Scheduler counters that are published in vLLM's /metrics.

Invariant: counters never decrease, and the queue lengths add up to the number of unfinished requests. The API server
collects the values from the engine process through prometheus_client's multiprocess directory, which must be set before
the engine starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from coldstart.contract.environment import PROMETHEUS_MULTIPROC_DIR

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
    """Publisher of counters and queue lengths to Prometheus. It does nothing if no multiprocess directory is set."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._gauges: dict[str, Any] | None = None
        self._published: dict[str, float] = {}
        if PROMETHEUS_MULTIPROC_DIR.read(environment):
            self._gauges = _create_gauges()

    @property
    def is_enabled(self) -> bool:
        return self._gauges is not None

    def publish(self, counters: SchedulerTotals, levels: Sequence[int] = ()) -> None:
        if self._gauges is None:
            return
        # Setting a gauge writes to a mapped file, and most counters rarely change.
        for name, value in vars(counters).items():
            if self._published.get(name) != value:
                self._published[name] = value
                self._gauges[name].set(value)
        for level, length in enumerate(levels, start=1):
            self._gauges["queue_length"].labels(level=str(level)).set(length)


def _create_gauges() -> dict[str, Any]:
    totals = {field.name: _create_gauge(field.name) for field in fields(SchedulerTotals)}
    return totals | {"queue_length": _create_gauge("queue_length", ("level",))}


def _create_gauge(name: str, labels: tuple[str, ...] = ()) -> Any:
    from prometheus_client import Gauge

    return Gauge(PREFIX + name, f"Scheduler: {name}.", labels, multiprocess_mode="livesum")
