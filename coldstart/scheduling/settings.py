"""What a scheduler can be told: one object with one set of defaults, for the server and for the simulated engine.

Invariants: an unknown member is an error that names the known ones, so a misspelt setting is never ignored; what the
command line leaves out has the same default in both engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from coldstart.errors import Usage
from coldstart.scheduling.profile import IterationProfile

KEY = "coldstart_scheduler"
"""Where vLLM's --additional-config carries the settings."""

FCFS = "fcfs"
AUTO = "auto"
"""The default of the command line; selects FCFS."""

REMOVED = "express"
"""Policy of earlier versions that configuration files and environment variables may still name."""

STRATEGIES = ("proactive", "reactive", "recompute")

FALLBACK_PROFILE = IterationProfile.from_points(
    [(1, 0.025), (512, 0.1), (8192, 1.6)], [(1, 0.025), (64, 0.04), (256, 0.08)]
)
"""Only ratios matter to the queues, so a plausible shape orders jobs until the bundle's profile is there."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """A policy and its tunables; None means: take it from the profile, or all there is.

    `batch` is B, the jobs per iteration (None: all the active slots). `alpha_s` is FastServe's starvation limit. Alone it
    turns the queues into round robin once everybody waits longer than that, so the limit in force is max(alpha_s,
    alpha_scale * active / B * decode time), and at most `promoted_cap` * B promoted jobs sit in Q1 at a time (None: no
    cap); alpha_scale 0 without a cap is the paper. `oldest_share` s of the time, in order of arrival, keeps every latency
    near 1/s times that of FCFS. `strategy` says what becomes of KV that does not fit (None: FCFS recomputes,
    as the engine does; the others are proactive).
    """

    policy: str = "skip-join-mlfq"
    batch: int | None = None
    first_quantum_s: float | None = None
    levels: int | None = None
    growth: float = 2.0
    eta: int = 1
    alpha_s: float = 0.3
    alpha_scale: float = 4.0
    promoted_cap: float | None = 0.25
    demote_to_head: bool = False
    oldest_share: float = 0.0
    strategy: str | None = None
    reserve_quantile: float = 0.9
    load_latency_s: float = 0.05
    profile: Mapping[str, object] | None = None

    @classmethod
    def read(cls, additional_config: object) -> SchedulerSettings:
        """Raises ValueError for unknown members or values out of range, Usage for the removed policy."""
        given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
        known = {field.name for field in fields(cls)}
        if isinstance(given, Mapping):
            refuse_removed(given.get("policy"))
        if not isinstance(given, Mapping) or set(given) - known:
            raise ValueError(f"{KEY} must be an object with members among {', '.join(sorted(known))}")
        settings = cls(**given)
        settings.check()
        if settings.policy == "srpt":
            raise ValueError("srpt needs output lengths, which no server knows; it exists in simulation only")
        return settings

    def additional_config(self) -> dict[str, object]:
        """What to pass as --additional-config: read(s.additional_config()) == s."""
        default = type(self)()
        told = {name: value for name, value in asdict(self).items() if value != getattr(default, name)}
        return {KEY: {"policy": self.policy, **told}}

    @property
    def kv_strategy(self) -> str:
        return self.strategy or ("recompute" if self.policy == FCFS else "proactive")

    def iteration_profile(self) -> IterationProfile:
        return FALLBACK_PROFILE if self.profile is None else IterationProfile.from_json(self.profile)

    def check(self) -> None:
        """Raises ValueError for a value out of range."""
        if self.strategy not in (None, *STRATEGIES):
            raise ValueError(f"unknown KV strategy {self.strategy!r}; one of {', '.join(STRATEGIES)}")
        if self.batch is not None and self.batch < 1:
            raise ValueError(f"the batch must be at least 1, got {self.batch}")
        if not 0 <= self.oldest_share <= 1:
            raise ValueError(f"oldest_share must be within 0 and 1, got {self.oldest_share}")


@dataclass(frozen=True)
class Choice:
    """What the command line says of a scheduler; None leaves a setting at its default, AUTO is fcfs.

    `batch` is the largest number of requests per iteration, times are seconds, `host_bytes` of host memory keep the KV of
    requests that were taken off the device.
    """

    policy: str = FCFS
    batch: int | None = None
    quantum_s: float | None = None
    eta: int | None = None
    alpha_s: float | None = None
    oldest_share: float | None = None
    reserve: float | None = None
    strategy: str | None = None
    host_bytes: int | None = None

    def __post_init__(self) -> None:
        refuse_removed(self.policy)
        if self.policy == AUTO:
            object.__setattr__(self, "policy", FCFS)

    def settings(self, profile: Mapping[str, object] | None = None) -> SchedulerSettings:
        """Raises ValueError for a value out of range, or for one that the policy does not have."""
        self._own()
        given = {
            "batch": self.batch,
            "first_quantum_s": self.quantum_s,
            "eta": self.eta,
            "alpha_s": self.alpha_s,
            "oldest_share": self.oldest_share,
            "reserve_quantile": self.reserve,
            # Nothing is kept on the host unless memory is given there, but for the queues.
            "strategy": self.strategy or ("proactive" if self.host_bytes and self.policy == FCFS else None),
            "profile": profile,
        }
        told = {name: value for name, value in given.items() if value is not None}
        settings = SchedulerSettings(policy=self.policy, **told)  # type: ignore[arg-type]
        settings.check()
        return settings

    def _own(self) -> None:
        """What a policy does not have is refused, not ignored."""
        if self.policy == FCFS and self != Choice(batch=self.batch, host_bytes=self.host_bytes):
            raise ValueError(
                "fcfs takes --batch and --kv-host-memory alone: "
                "the other settings belong to --scheduler skip-join-mlfq"
            )


def refuse_removed(policy: object) -> None:
    """Raise Usage if `policy` is the removed express lane."""
    if policy == REMOVED:
        raise Usage(
            f"cannot use scheduler {REMOVED!r}: it was removed, because its gain on a live server could not be measured",
            mend="use --scheduler auto or --scheduler skip-join-mlfq",
        )
