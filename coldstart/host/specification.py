"""Specifications of a host's models, with their residency tiers, and the settings of the host.

Invariant: the tiers of a model begin with `awake` and end with `stopped`. From each tier to the next, device memory does
not increase and the penalty does not decrease. Initial values come from the bundle and are corrected by measurements.
"""

# ruff: noqa: RUF009 - `setting` returns a dataclass field
from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from itertools import pairwise
from typing import NoReturn

from coldstart.errors import UsageError
from coldstart.host.tables import Seconds, Size, check_ranges
from coldstart.scheduling.declaration import setting

AWAKE, STOPPED = "awake", "stopped"


@dataclass(frozen=True, slots=True)
class Tier:
    """Residency tier of a model: awake, asleep-1, asleep-2, parked or stopped.

    In this tier, the model uses `memory` bytes of device memory and `host_memory` bytes of CPU memory. A request that
    finds the model in this tier waits `penalty_s` seconds until the model is ready.
    """

    name: str
    memory: Size
    penalty_s: Seconds
    host_memory: Size = 0


def stopped(penalty_s: float) -> Tier:
    return Tier(STOPPED, 0, penalty_s)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Specification of a model that a host schedules.

    The model stops after `idle_s` seconds without a request, or never if `idle_s` is None. A pinned model starts with the
    host and is never evicted. `prewarm` is a cron expression for scheduled starts. The memory of the model is spread
    evenly over the devices with the indices `devices`. If `devices` is empty, the model is not assigned to devices.
    `memory_source` is the source of its memory sizes: file, bundle or assumed. `least_memory` is the device memory of its
    server with the smallest KV cache, or 0 if its memory cannot be reduced.
    """

    name: str
    tiers: tuple[Tier, ...]
    pinned: bool = False
    idle_s: float | None = None
    prewarm: str | None = None
    devices: tuple[int, ...] = ()
    memory_source: str = "file"
    least_memory: int = 0

    def __post_init__(self) -> None:
        names = [tier.name for tier in self.tiers]
        if len(names) < 2 or names[0] != AWAKE or names[-1] != STOPPED or len(set(names)) < len(names):
            self._reject(
                f"expected unique names from {AWAKE} to {STOPPED}, found {', '.join(names)}",
                f"list each tier between {AWAKE} and {STOPPED} once",
            )
        for upper, lower in pairwise(self.tiers):
            if lower.memory > upper.memory or lower.penalty_s < upper.penalty_s:
                self._reject(
                    f"{lower.name} uses more memory or has a shorter penalty than {upper.name}",
                    "order the tiers by memory, largest first; penalty_s must not decrease",
                )
        if self.tiers[0].memory <= 0 or self.tiers[-1].memory or self.tiers[-1].host_memory:
            self._reject(
                f"{AWAKE} must use memory, and {STOPPED} must use none", "set memory to a size above 0"
            )

    def _reject(self, reason: str, hint: str) -> NoReturn:
        raise UsageError(f"models.{self.name}.tiers: {reason}", hint=hint)

    @classmethod
    def with_two_tiers(cls, name: str, memory: int, penalty_s: float, **more: object) -> ModelSpec:
        """Create a specification that has only the tiers `awake` and `stopped`."""
        return cls(name, (Tier(AWAKE, memory, 0.0), stopped(penalty_s)), **more)  # type: ignore[arg-type]


HELD_HELP = "Maximum number of waiting requests before HTTP 429 is returned."


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Settings that a host and a fleet have in common. Times are in seconds.

    A server that makes no progress for `hang_timeout_s` is killed (see `live.servers.await_hang`).
    """

    max_held: int = setting(256, HELD_HELP, "--max-held", "N", minimum=0)
    hold_s: Seconds = setting(600.0, "", exclusive_minimum=0)
    backoff_s: Seconds = 1.0
    backoff_max_s: Seconds = 300.0
    hang_timeout_s: Seconds = setting(
        120.0,
        "Kill a server that makes no progress for this many seconds.",
        "--hang-timeout",
        "SECONDS",
        minimum=1,
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings(GatewaySettings):
    """Settings of a host. Sizes are in bytes, and times are in seconds.

    `memory` and `host_memory` limit the device memory and the CPU memory of all models together. `device_memory` is the size
    of each device, or None if only `memory` limits the models. After a request has waited `patience_s` because idle models do
    not free enough memory, busy models drain: they finish their requests and are evicted. If `runtime_template` is set, a
    live host keeps a process that has done all Python imports, and forks servers from it. If `resume_streams` is set, a
    stream whose server died continues once on the next server of its model, and streams of a replaced server move to the new
    one. `default_model` serves requests without a model name. It never stops when idle, and restarts when memory is free.
    """

    memory: Size = setting(
        MISSING,
        "Memory limit for all models together, such as 60GiB: GPU memory, or RAM if vLLM runs on the CPU.",
        "--memory",
        "SIZE",
        minimum=1,
    )
    host_memory: Size = setting(0, "", minimum=0)
    device_memory: Size | None = setting(None, "", minimum=1)
    policy: str = setting(
        "predictive",
        "Policy that selects the model to evict when memory is full: lru, iam or predictive.",
        "--policy",
        "NAME",
    )
    loaders: int = setting(1, "", minimum=1)
    patience_s: float = 30.0
    max_residents: int | None = setting(
        None,
        "Maximum number of models that run at the same time; default: no limit except memory.",
        "--max-residents",
        "N",
        minimum=1,
    )
    ready_timeout_s: Seconds = setting(
        600.0, "Maximum duration of a start, in seconds; a longer start fails.", "--ready-timeout", "SECONDS"
    )
    runtime_template: bool = True
    resume_streams: bool = False
    default_model: str | None = None

    @property
    def bytes_per_device(self) -> int:
        """Return the memory limit of each device in bytes."""
        return self.memory if self.device_memory is None else self.device_memory


@dataclass(slots=True)
class ObservedCosts:
    """Memory and penalties of a model: the specified values, corrected by measurements.

    The first measured penalty of a tier replaces the specified value, which may come from a different start mode. Each later
    measurement moves the penalty toward the new value by the fraction WEIGHT of the difference. `source` is the source of the
    memory size, and is "observed" after a measurement.
    """

    spec: ModelSpec
    source: str = field(init=False)
    _memory: dict[str, int] = field(init=False)
    _penalty_s: dict[str, float] = field(init=False)
    _timed: set[str] = field(init=False, default_factory=set)

    WEIGHT = 1 / 3

    def __post_init__(self) -> None:
        self.source = self.spec.memory_source
        self._memory = {tier.name: tier.memory for tier in self.spec.tiers}
        self._penalty_s = {tier.name: tier.penalty_s for tier in self.spec.tiers}

    @property
    def memory(self) -> int:
        """Return the device memory of the ready model in bytes."""
        return self._memory[AWAKE]

    def penalty_s(self, tier: Tier) -> float:
        return self._penalty_s[tier.name]

    def memory_in(self, tier: Tier) -> int:
        """Return the device memory in this residency tier in bytes, which is at most that of the ready model."""
        return self.memory if tier.name == AWAKE else min(self._memory[tier.name], self.memory)

    def record_memory(self, memory: int) -> None:
        """Record the measured device memory of the ready model in bytes."""
        self._memory[AWAKE], self.source = memory, "observed"

    def record_start(self, tier: Tier, seconds: float) -> None:
        """Record that a start from the residency tier `tier` took `seconds` seconds."""
        before = self._penalty_s[tier.name]
        weight = self.WEIGHT if tier.name in self._timed else 1.0
        self._timed.add(tier.name)
        self._penalty_s[tier.name] = before + weight * (seconds - before)
