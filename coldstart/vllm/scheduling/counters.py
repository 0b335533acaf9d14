"""Counters of the scheduler, also published in vLLM's /metrics.

Invariant: counters only grow; levels sum to the live requests. vLLM's front end collects metrics of the engine
process through prometheus_client's multiprocess directory, so they appear if that is set before the start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from coldstart.contract.environment import PROMETHEUS_MULTIPROC_DIR

PREFIX = "coldstart_scheduler_"


@dataclass
class Counters:
    """Totals since the start.

    vLLM counts the bytes of transfers itself (`vllm:kv_offload_*`). `blocks_evicted` were freed on the device without a copy,
    because blocks are stored as they fill. Request-seconds: `blocked_on_loads_seconds` with KV on the host although the rank
    earned a slot, `loading_seconds` the part of it during a transfer (not waiting for space).
    """

    evictions: int = 0
    loads: int = 0
    blocks_evicted: int = 0
    demotions: int = 0
    promotions: int = 0
    parks: int = 0
    blocked_on_loads_seconds: float = 0.0
    loading_seconds: float = 0.0


class Exporter:
    """Publishes counters and queue lengths; does nothing without a multiprocess directory."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._gauges: dict[str, Any] | None = None
        self._told: dict[str, float] = {}
        if PROMETHEUS_MULTIPROC_DIR.read(environment):
            self._gauges = _make_gauges()

    @property
    def enabled(self) -> bool:
        return self._gauges is not None

    def publish(self, counters: Counters, levels: Sequence[int] = ()) -> None:
        if self._gauges is None:
            return
        # Setting a gauge writes to a mapped file, and most counters change in few steps.
        for name, value in vars(counters).items():
            if self._told.get(name) != value:
                self._told[name] = value
                self._gauges[name].set(value)
        for level, length in enumerate(levels, start=1):
            self._gauges["queue_length"].labels(level=str(level)).set(length)


def _make_gauges() -> dict[str, Any]:
    totals = {field.name: _gauge(field.name) for field in fields(Counters)}
    return totals | {"queue_length": _gauge("queue_length", ("level",))}


def _gauge(name: str, labels: tuple[str, ...] = ()) -> Any:
    from prometheus_client import Gauge

    return Gauge(PREFIX + name, f"Scheduler: {name}.", labels, multiprocess_mode="livesum")
