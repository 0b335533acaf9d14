"""Specification of the models and limits of a host: tiers with their memory and penalty.

Invariant: a model's tiers begin with `awake` and end with `stopped`; device memory does not increase and the penalty
does not decrease from one tier to the next. The values come from the bundle and are corrected by measurements.
"""

# ruff: noqa: RUF009 - `setting` returns a dataclass field
from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from itertools import pairwise
from typing import NoReturn

from coldstart.errors import UsageError
from coldstart.host.tables import Seconds, Size, require_settings
from coldstart.scheduling.declaration import setting

AWAKE, STOPPED = "awake", "stopped"
QUEUE, REFUSE = "queue", "refuse"


@dataclass(frozen=True, slots=True)
class Tier:
    """Residency level of a model: awake, asleep-1, asleep-2 or stopped.

    `memory` and `host_memory` are the bytes held on the device and in host memory; `penalty_s` is the time until it is
    ready.
    """

    name: str
    memory: Size
    penalty_s: Seconds
    host_memory: Size = 0


def stopped(penalty_s: float) -> Tier:
    return Tier(STOPPED, 0, penalty_s)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Specification of a model. It stops after `idle_s` without a request; None: never.

    A pinned model is started at once and never evicted. `prewarm` is a cron expression of the moments at which it starts.
    `devices` are the numbers of the devices over which its memory is spread evenly; empty: it is not placed.
    `memory_source` is the source of its memory: file, bundle or assumed.
    """

    name: str
    tiers: tuple[Tier, ...]
    pinned: bool = False
    idle_s: float | None = None
    prewarm: str | None = None
    devices: tuple[int, ...] = ()
    memory_source: str = "file"

    def __post_init__(self) -> None:
        names = [tier.name for tier in self.tiers]
        if len(names) < 2 or names[0] != AWAKE or names[-1] != STOPPED or len(set(names)) < len(names):
            self._reject(
                f"expected different names from {AWAKE} to {STOPPED}, found {', '.join(names)}",
                f"name each tier between {AWAKE} and {STOPPED} once",
            )
        for upper, lower in pairwise(self.tiers):
            if lower.memory > upper.memory or lower.penalty_s < upper.penalty_s:
                self._reject(
                    f"{lower.name} holds more memory than {upper.name}, or returns sooner",
                    "order the tiers by memory, the largest first; penalty_s must not decrease",
                )
        if self.tiers[0].memory <= 0 or self.tiers[-1].memory or self.tiers[-1].host_memory:
            self._reject(f"{AWAKE} must hold memory and {STOPPED} none", "write a memory above 0")

    def _reject(self, reason: str, hint: str) -> NoReturn:
        raise UsageError(f"models.{self.name}.tiers: {reason}", hint=hint)

    @classmethod
    def simple(cls, name: str, memory: int, penalty_s: float, **more: object) -> ModelSpec:
        """Return a specification with the tiers awake and stopped only."""
        return cls(name, (Tier(AWAKE, memory, 0.0), stopped(penalty_s)), **more)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class HostSettings:
    """Limits of a host: `memory` and `host_memory` in bytes for all models together; times in seconds.

    `device_memory` is the size in bytes of each device on which models are placed; None: only `memory` limits them.

    `when_full` decides about a request whose model cannot evict another one: it waits, or is rejected. A request that
    waits longer than `patience_s` makes busy models drain: they finish their requests, accept no new ones, and are
    evicted. With `runtime_template` a live host retains a process with the runtime imported, from which starts are
    forked. A server that makes no progress for `hang_timeout_s` is killed (`live.servers.find_hang` has the rule). With
    `resume_streams` a stream whose server died continues, once, at the next server of its model. `default_model`
    answers requests that name no model. It has no idle time, and starts again when memory is free.
    """

    memory: Size = setting(
        MISSING,
        "Memory of all models together, such as 60GiB: of the GPU, or RAM on the CPU.",
        "--memory",
        "SIZE",
        least=1,
    )
    host_memory: Size = setting(0, "", least=0)
    device_memory: Size | None = setting(None, "", least=1)
    policy: str = setting(
        "predictive", "Eviction policy when memory is full: lru, iam or predictive.", "--policy", "NAME"
    )
    loaders: int = setting(1, "", least=1)
    max_held: int = setting(
        256, "Maximum number of waiting requests before HTTP 429 is returned.", "--max-held", "N", least=0
    )
    when_full: str = setting(
        QUEUE,
        "Queue or refuse a request whose model finds no memory.",
        "--when-full",
        "queue|refuse",
        choices=(QUEUE, REFUSE),
    )
    patience_s: float = 30.0
    hold_s: float = 600.0
    max_residents: int | None = setting(
        None,
        "Maximum number of models that run at once; default: as memory allows.",
        "--max-residents",
        "N",
        least=1,
    )
    ready_timeout_s: Seconds = setting(
        600.0, "Abort a start that takes longer than this.", "--ready-timeout", "SECONDS"
    )
    hang_timeout_s: Seconds = setting(
        120.0, "Kill a server that makes no progress for this time.", "--hang-timeout", "SECONDS", least=1
    )
    backoff_s: float = 1.0
    backoff_max_s: float = 300.0
    runtime_template: bool = True
    resume_streams: bool = False
    default_model: str | None = None

    @property
    def each_device(self) -> int:
        """Return the bytes that models may hold on each device."""
        return self.memory if self.device_memory is None else self.device_memory

    def __post_init__(self) -> None:
        require_settings(self)


@dataclass(slots=True)
class Observed:
    """Memory and penalties of a model: those of its specification, corrected by measurements.

    The first measured penalty of a tier replaces its estimate: a bundle's start may have had another mode, and the policy
    compares resident models, which have all started. Later ones change it by WEIGHT times the difference. `source` is the
    source of the memory, which a measurement makes "observed".
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
        """Return the device bytes of the tier awake."""
        return self._memory[AWAKE]

    def penalty_s(self, tier: Tier) -> float:
        return self._penalty_s[tier.name]

    def memory_in(self, tier: Tier) -> int:
        """Return the bytes of GPU memory in this tier, at most as many as in the tier `awake`."""
        return self.memory if tier.name == AWAKE else min(self._memory[tier.name], self.memory)

    def measured(self, memory: int) -> None:
        """Record the measured device bytes of the tier awake."""
        self._memory[AWAKE], self.source = memory, "observed"

    def started(self, tier: Tier, seconds: float) -> None:
        """Record a start from `tier` after `seconds`."""
        before = self._penalty_s[tier.name]
        weight = self.WEIGHT if tier.name in self._timed else 1.0
        self._timed.add(tier.name)
        self._penalty_s[tier.name] = before + weight * (seconds - before)
