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
from coldstart.scheduling.express.lane import Lane
from coldstart.scheduling.express.policy import Express

PREFIX = "coldstart_scheduler_"


@dataclass
class KvCounters:
    """Totals since the start. Bytes count whole KV blocks: decided when a transfer starts, moved when the workers
    report it; blocks_evicted were freed on the device without a copy, since blocks are stored as they fill.
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


@dataclass
class Counters(KvCounters):
    """Of skip-join MLFQ. Request-seconds: blocked_on_loads_s with KV on the host although the rank earned a slot,
    loading_s of these in a transfer (not for room).
    """

    demotions: int = 0
    promotions: int = 0
    parks: int = 0
    blocked_on_loads_s: float = 0.0
    loading_s: float = 0.0


@dataclass
class LaneCounters(KvCounters):
    """Of the express lane: passes, those extended and parked at the end of a quantum, chances summed of the passes that are
    over and how many of them ended in the lane; seconds in which somebody was left out, what the lane had of them, and the
    most that it owed. The last three are of now: the ledger's balance, its honesty, and requests in the lane.
    """

    passes: int = 0
    extended: int = 0
    parks: int = 0
    passes_foretold: float = 0.0
    passes_kept: int = 0
    crowded_s: float = 0.0
    lane_s: float = 0.0
    owed_s: float = 0.0
    balance_s: float = 0.0
    honesty: float = 1.0
    in_lane: int = 0

    def read(self, policy: Express, lane: Lane[Any]) -> None:
        totals, ledger = policy.totals, policy.ledger
        self.passes, self.extended, self.parks = totals.passes, totals.extended, totals.parked
        self.passes_foretold, self.passes_kept = totals.foretold, totals.kept
        self.crowded_s, self.lane_s, self.owed_s = ledger.crowded_s, ledger.taken_s, ledger.owed_s
        self.balance_s, self.honesty, self.in_lane = ledger.balance, ledger.honesty.share, len(lane.members)


class Exporter:
    """Publishes counters and queue lengths; does nothing without a multiprocess directory."""

    def __init__(self, counters: type[KvCounters], environment: Mapping[str, str] = os.environ) -> None:
        self._gauges: dict[str, Any] | None = None
        self._told: dict[str, float] = {}
        if PROMETHEUS_MULTIPROC_DIR.read(environment):
            self._gauges = _make_gauges(counters)

    @property
    def enabled(self) -> bool:
        return self._gauges is not None

    def publish(self, counters: KvCounters, levels: Sequence[int] = ()) -> None:
        if self._gauges is None:
            return
        # A gauge is written to a file that is mapped, which most counters need at few steps only.
        for name, value in vars(counters).items():
            if self._told.get(name) != value:
                self._told[name] = value
                self._gauges[name].set(value)
        for level, length in enumerate(levels, start=1):
            self._gauges["queue_length"].labels(level=str(level)).set(length)


class RankBytes:
    """Bytes of KV that this process, one rank, has copied each way, as rank_bytes_in and rank_bytes_out by rank."""

    def __init__(self, rank: int, environment: Mapping[str, str] = os.environ) -> None:
        self.totals = {"in": 0, "out": 0}
        self._gauges: dict[str, Any] = {}
        if PROMETHEUS_MULTIPROC_DIR.read(environment):
            self._gauges = {
                way: _gauge(f"rank_bytes_{way}", ("rank",)).labels(str(rank)) for way in self.totals
            }

    def add(self, way: str, size: int) -> None:
        """`way` is "in" from the host or "out" to it; each has one thread."""
        self.totals[way] += size
        if self._gauges:
            self._gauges[way].set(self.totals[way])


def _make_gauges(counters: type[KvCounters]) -> dict[str, Any]:
    totals = {field.name: _gauge(field.name) for field in fields(counters)}
    return totals | ({"queue_length": _gauge("queue_length", ("level",))} if counters is Counters else {})


def _gauge(name: str, labels: tuple[str, ...] = ()) -> Any:
    from prometheus_client import Gauge

    return Gauge(PREFIX + name, f"Scheduler: {name}.", labels, multiprocess_mode="livesum")
