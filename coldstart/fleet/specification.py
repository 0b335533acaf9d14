"""Specification of a fleet: its servers, models and settings.

Invariant: a valid model can be started on some sufficiently large server; values are in bytes and seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from coldstart.errors import UsageError
from coldstart.fleet.sizing import MOST_RANKS, Demand
from coldstart.fleet.timing import Costs
from coldstart.host.tables import Rate, Seconds, Size


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """`devices` of `memory` bytes each behind one link."""

    name: str
    memory: Size
    network: Rate
    load: Rate
    devices: int = 1

    def __post_init__(self) -> None:
        if self.memory <= 0 or self.network <= 0 or self.load <= 0 or self.devices < 1:
            raise UsageError(
                f"server {self.name}: memory, network and load must be above 0, devices at least 1"
            )


@dataclass(frozen=True, slots=True)
class FleetModel:
    """`size` bytes of weights, `memory` device bytes to serve; between `least` and `most` workers.

    A worker stops after `idle_s` without a request and serves `batch` concurrent requests. `joins` are measured
    seconds from loaded weights to ready, by number of ranks; they replace `join_s` of the costs.
    """

    name: str
    size: Size
    memory: Size
    costs: Costs
    ttft_s: Seconds = inf
    tpot_s: Seconds = inf
    batch: int = 8
    least: int = 0
    most: int = 16
    idle_s: Seconds = 60.0
    shares: dict[int, tuple[int, ...]] = field(default_factory=dict)
    joins: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.size <= self.memory:
            raise UsageError(
                f"model {self.name}: size must be above 0 and at most memory, found {self.size} and {self.memory} bytes"
            )
        if self.batch < 1 or not 0 <= self.least <= self.most or self.most < 1 or self.idle_s < 0:
            raise UsageError(
                f"model {self.name}: batch and most must be 1 or more, least from 0 to most, idle_s 0 or more"
            )
        for ranks, shares in self.shares.items():
            if len(shares) != ranks or min(shares) <= 0:
                raise UsageError(f"model {self.name}: {len(shares)} shares for {ranks} ranks")

    def demand(self, waited_s: float, beside: bool) -> Demand:
        return Demand(
            self.size,
            self.memory,
            self.costs,
            self.ttft_s,
            self.tpot_s,
            waited_s,
            self.shares,
            beside,
            self.joins,
        )


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Settings of the fleet's decisions.

    A server that makes no progress for `hang_timeout_s` is killed (`host.live.hang` has the rule).

    `beside` counts the device memory of an engine that loads beside its rank (required by vLLM); without it the
    worker grows in place, as in the paper. `reclaim` stops idle workers early when another model finds no room.
    """

    most_ranks: int = MOST_RANKS
    window_s: Seconds = 1.0
    consolidate: bool = True
    beside: bool = True
    reclaim: bool = True
    retries: int = 2
    hold_s: Seconds = 600.0
    max_held: int = 1 << 20
    backoff_s: Seconds = 1.0
    backoff_max_s: Seconds = 300.0
    hang_timeout_s: Seconds = 120.0

    def __post_init__(self) -> None:
        if not 1 <= self.most_ranks <= 16 or self.window_s < 0 or self.hold_s <= 0 or self.retries < 0:
            raise UsageError(
                "most_ranks must be from 1 to 16, window_s and retries 0 or more, hold_s above 0"
            )
        if self.hang_timeout_s < 1:
            raise UsageError("hang_timeout_s must be at least 1", hint="hang_timeout_s = 120")
