"""What the scheduler did, as counters, and the same in vLLM's /metrics.

Invariant: counters only grow; levels sum to the live requests. vLLM's front end gathers metrics of the engine
process through prometheus_client's multiprocess directory, so they appear when that is set before the start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from coldstart.contract.environment import PROMETHEUS_MULTIPROC_DIR

PREFIX = "coldstart_scheduler_"


@dataclass(slots=True)
class Counters:
    """Totals since the start. Bytes count whole KV blocks: decided when a transfer starts, moved when the workers
    report it; blocks_evicted were freed on the device without a copy, since blocks are stored as they fill. Request-seconds:
    blocked_on_loads_s with KV on the host although the rank earned a slot, loading_s of these in a transfer (not for room).
    """

    demotions: int = 0
    promotions: int = 0
    parks: int = 0
    evictions: int = 0
    loads: int = 0
    blocks_evicted: int = 0
    blocks_stored: int = 0
    blocks_loaded: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    bytes_out_moved: int = 0
    bytes_in_moved: int = 0
    blocked_on_loads_s: float = 0.0
    loading_s: float = 0.0


class Exporter:
    """Publishes counters and queue lengths; does nothing without a multiprocess directory."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._gauges: dict[str, Any] | None = None
        if PROMETHEUS_MULTIPROC_DIR.read(environment):
            self._gauges = _make_gauges()

    @property
    def enabled(self) -> bool:
        return self._gauges is not None

    def publish(self, counters: Counters, levels: Sequence[int]) -> None:
        if self._gauges is None:
            return
        for field in fields(counters):
            self._gauges[field.name].set(getattr(counters, field.name))
        for level, length in enumerate(levels, start=1):
            self._gauges["queue_length"].labels(level=str(level)).set(length)


def _make_gauges() -> dict[str, Any]:
    from prometheus_client import Gauge

    def gauge(name: str, labels: tuple[str, ...] = ()) -> Any:
        return Gauge(PREFIX + name, f"Scheduler: {name}.", labels, multiprocess_mode="livesum")

    totals = {field.name: gauge(field.name) for field in fields(Counters)}
    return totals | {"queue_length": gauge("queue_length", ("level",))}
