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

    Bytes count full KV blocks: `bytes_*` when a transfer is decided, `bytes_*_moved` when the workers report it.
    `blocks_evicted` were freed on the device without a copy, because blocks are stored as they fill. Request-seconds:
    `blocked_on_loads_s` with KV on the host although the rank earned a slot, `loading_s` the part of it during a transfer (not
    waiting for space).
    """

    evictions: int = 0
    loads: int = 0
    blocks_evicted: int = 0
    blocks_stored: int = 0
    blocks_loaded: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    bytes_out_moved: int = 0
    bytes_in_moved: int = 0
    demotions: int = 0
    promotions: int = 0
    parks: int = 0
    blocked_on_loads_s: float = 0.0
    loading_s: float = 0.0


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
                for exported in list_exported(name):
                    self._gauges[exported].set(value)
        for level, length in enumerate(levels, start=1):
            self._gauges["queue_length"].labels(level=str(level)).set(length)


class RankBytes:
    """Bytes of KV that this process, one rank, has copied, exported as rank_bytes_in and rank_bytes_out by rank."""

    def __init__(self, rank: int, environment: Mapping[str, str] = os.environ) -> None:
        self.totals = {"in": 0, "out": 0}
        self._gauges: dict[str, Any] = {}
        if PROMETHEUS_MULTIPROC_DIR.read(environment):
            self._gauges = {
                way: _gauge(f"rank_bytes_{way}", ("rank",)).labels(str(rank)) for way in self.totals
            }

    def add(self, way: str, size: int) -> None:
        """Count `size` bytes; `way` is "in" from the host or "out" to it, each used by one thread."""
        self.totals[way] += size
        if self._gauges:
            self._gauges[way].set(self.totals[way])


def list_exported(counter: str) -> tuple[str, ...]:
    """Return the names, without their prefix, under which a counter is exported: one in `_s` also ends in `_seconds`."""
    return (counter, f"{counter}econds") if counter.endswith("_s") else (counter,)


def _make_gauges() -> dict[str, Any]:
    totals = {name: _gauge(name) for field in fields(Counters) for name in list_exported(field.name)}
    return totals | {"queue_length": _gauge("queue_length", ("level",))}


def _gauge(name: str, labels: tuple[str, ...] = ()) -> Any:
    from prometheus_client import Gauge

    return Gauge(PREFIX + name, f"Scheduler: {name}.", labels, multiprocess_mode="livesum")
