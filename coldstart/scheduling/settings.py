"""What a scheduler can be told: one object with one set of defaults, for the server and for the simulated engine.

Invariants: an unknown member is an error that names the known ones, so a misspelt setting is never ignored; what the
command line leaves out has the same default in both engines, but that express on a CPU computes evicted KV again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from coldstart.scheduling.profile import IterationProfile

KEY = "coldstart_scheduler"
"""Where vLLM's --additional-config carries the settings."""

FCFS = "fcfs"
EXPRESS = "express"
SPARING = (FCFS, EXPRESS)
"""Evicted KV is computed again, unless host memory for it is asked for."""

AUTO = "auto"
"""What runs where nobody chooses: fcfs. Express takes its place once live figures, not only simulated ones, hold its bars."""

ADAPTER, PREFIX, MAX_TOKENS = "adapter", "prefix", "max-tokens"
CLASSES = (ADAPTER, PREFIX, MAX_TOKENS)
"""What can make a class of requests whose lengths are learned apart: the adapter, the first block of the prompt, the octave of
the longest answer that is asked for.
"""

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
    near 1/s times that of FCFS. `strategy` says what becomes of KV that does not fit (None: FCFS, as the engine does, and
    express recompute, the others are proactive). `price` is the share of the contended resource that may be served ahead of
    its turn, `margin` how much more than the main lane's its index must be (with a smaller one long requests pay for what gains
    little), `half_life` and `trust` the completions by which what was learned of lengths is half forgotten, and is first used.
    `explain` writes down why a request passes, where somebody watches; `classes` are the traits of CLASSES by which lengths are
    learned.
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
    price: float = 0.1
    margin: float = 2.0
    half_life: float = 400.0
    trust: int = 40
    explain: bool = False
    classes: tuple[str, ...] = ()
    profile: Mapping[str, object] | None = None

    @classmethod
    def read(cls, additional_config: object) -> SchedulerSettings:
        """Raises ValueError for unknown members or values out of range."""
        given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
        known = {field.name for field in fields(cls)}
        if not isinstance(given, Mapping) or set(given) - known:
            raise ValueError(f"{KEY} must be an object with members among {', '.join(sorted(known))}")
        # JSON has no tuples.
        settings = cls(**{**given, "classes": tuple(given.get("classes", ()))})
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
        return self.strategy or ("recompute" if self.policy in SPARING else "proactive")

    def iteration_profile(self) -> IterationProfile:
        return FALLBACK_PROFILE if self.profile is None else IterationProfile.from_json(self.profile)

    def check(self) -> None:
        """Raises ValueError for a value out of range."""
        if self.strategy not in (None, *STRATEGIES):
            raise ValueError(f"unknown KV strategy {self.strategy!r}; one of {', '.join(STRATEGIES)}")
        if self.batch is not None and self.batch < 1:
            raise ValueError(f"the batch must be at least 1, got {self.batch}")
        if not 0 <= self.price < 1:
            raise ValueError(f"the price must be at least 0 and below 1, got {self.price}")
        if self.margin < 1 or self.half_life <= 0 or self.trust < 1:
            raise ValueError("margin and trust must be at least 1, the half-life above 0")
        if wrong := set(self.classes) - set(CLASSES):
            raise ValueError(f"unknown class {min(wrong)!r}; of {', '.join(CLASSES)}")
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
    price: float | None = None
    margin: float | None = None
    classes: str | None = None
    reserve: float | None = None
    strategy: str | None = None
    host_bytes: int | None = None
    explain: bool = False

    def __post_init__(self) -> None:
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
            "price": self.price,
            "margin": self.margin,
            "classes": None if self.classes is None else tuple(filter(None, self.classes.split(","))),
            "reserve_quantile": self.reserve,
            # Nothing is kept on the host unless memory is given there, but for the queues.
            "strategy": self.strategy
            or ("proactive" if self.host_bytes and self.policy in SPARING else None),
            "profile": profile,
        }
        told = {name: value for name, value in given.items() if value is not None}
        settings = SchedulerSettings(policy=self.policy, explain=self.explain, **told)  # type: ignore[arg-type]
        settings.check()
        return settings

    def _own(self) -> None:
        """What a policy does not have is refused, not ignored."""
        if self.policy == FCFS and self != Choice(batch=self.batch, host_bytes=self.host_bytes):
            raise ValueError(
                "fcfs takes --batch and --kv-host-memory alone: "
                "the other settings belong to --scheduler skip-join-mlfq or express"
            )
        queues = {
            "--quantum": self.quantum_s,
            "--eta": self.eta,
            "--alpha": self.alpha_s,
            "--oldest-share": self.oldest_share,
            "--reserve": self.reserve,
        }
        if self.policy == EXPRESS and (
            given := [flag for flag, value in queues.items() if value is not None]
        ):
            raise ValueError(f"express has no {given[0]}: it belongs to --scheduler skip-join-mlfq")
        express = {
            "--price": self.price is not None,
            "--margin": self.margin is not None,
            "--classes": self.classes is not None,
            "--explain-scheduling": self.explain,
        }
        if self.policy != EXPRESS and (given := [flag for flag, said in express.items() if said]):
            raise ValueError(f"{self.policy} has no {given[0]}: it belongs to --scheduler express")
