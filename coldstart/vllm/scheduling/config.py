"""The scheduler's settings, carried by vLLM's --additional-config under the key 'coldstart_scheduler'.

Invariant: an unknown member is an error that names the known ones, so a misspelt setting is never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from coldstart.scheduling.mlfq import MlfqSettings
from coldstart.scheduling.profile import IterationProfile

KEY = "coldstart_scheduler"
STRATEGIES = ("proactive", "reactive", "recompute")

FALLBACK_PROFILE = IterationProfile.from_points(
    [(1, 0.025), (512, 0.1), (8192, 1.6)], [(1, 0.025), (64, 0.04), (256, 0.08)]
)
"""Only ratios matter to the queues, so a plausible shape orders jobs until the bundle's profile is there."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """`batch` is B, the jobs per iteration (None: all the active slots); `alpha_scale` and `promoted_cap`
    temper starvation prevention under overload, `oldest_share` s of the time, in order of arrival, keeps every
    latency near 1/s times that of FCFS.
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
    strategy: str = "proactive"
    reserve_quantile: float = 0.9
    load_latency_s: float = 0.05
    profile: Mapping[str, object] | None = None

    @classmethod
    def read(cls, additional_config: object) -> SchedulerSettings:
        """Raises ValueError for unknown members or values out of range."""
        given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
        known = {field.name for field in fields(cls)}
        if not isinstance(given, Mapping) or set(given) - known:
            raise ValueError(f"{KEY} must be an object with members among {', '.join(sorted(known))}")
        settings = cls(**given)
        settings._check()
        return settings

    def additional_config(self) -> dict[str, object]:
        """What to pass as --additional-config: read(s.additional_config()) == s."""
        return {KEY: {name: value for name, value in asdict(self).items() if value is not None}}

    def iteration_profile(self) -> IterationProfile:
        return FALLBACK_PROFILE if self.profile is None else IterationProfile.from_json(self.profile)

    def mlfq(self) -> MlfqSettings:
        return MlfqSettings(**{field.name: getattr(self, field.name) for field in fields(MlfqSettings)})

    def _check(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"unknown KV strategy {self.strategy!r}; one of {', '.join(STRATEGIES)}")
        if self.policy == "srpt":
            raise ValueError("srpt needs output lengths, which no server knows; it exists in simulation only")
        if self.batch is not None and self.batch < 1:
            raise ValueError(f"the batch must be at least 1, got {self.batch}")
        if not 0 <= self.oldest_share <= 1:
            raise ValueError(f"oldest_share must be within 0 and 1, got {self.oldest_share}")
