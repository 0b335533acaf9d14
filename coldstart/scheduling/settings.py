"""Scheduler settings, declared once for the command line, the server's arguments and the simulated engine.

Each field of `SchedulerSettings` has a `Setting` with its help text, option, placeholder and range.
Invariant: an unknown field or a value that is out of range is an error, so no setting is silently ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from math import inf
from pathlib import Path
from typing import Literal, get_args

import msgspec

from coldstart.scheduling.deadline import DeadlinePolicy
from coldstart.scheduling.declaration import Setting, list_settings, setting
from coldstart.scheduling.profile import FALLBACK_PROFILE, IterationProfile

KEY = "coldstart_scheduler"
"""Key of the scheduler settings in vLLM's --additional-config."""

FCFS, MLFQ, DEADLINE = "fcfs", "skip-join-mlfq", "deadline"
AUTO = "auto"
"""Default on the command line; currently selects FCFS."""

MlfqVariant = Literal["tempered", "paper"]
MLFQ_VARIANTS = get_args(MlfqVariant)

KvStrategy = Literal["proactive", "reactive", "recompute"]
STRATEGIES = get_args(KvStrategy)

# The reserve applies only to proactive loads, and `recompute` stores no KV on the host.
_VLLM_POLICIES = (FCFS, DEADLINE)
_STRATEGIES_USING = {"reserve_quantile": STRATEGIES[:1], "host_bytes": STRATEGIES[:2]}


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Scheduling policy and its settings. Fields without an option are set only through vLLM's --additional-config.

    `alpha_s` is FastServe's starvation limit. A fixed limit turns the queues into round robin once every request waits
    longer than the limit. The tempered limit is therefore max(alpha_s, `alpha_growth` * time to give every request one
    iteration), and the first queue contains at most `promoted_share` * batch promoted requests.
    """

    policy: str = setting(
        MLFQ,
        "Scheduling policy: fcfs (vLLM's arrival order), deadline (vLLM's priority order, by arrival plus a multiple of the"
        " prefill time), skip-join-mlfq (preempts long requests), or auto (currently fcfs).",
        "--scheduler",
        "NAME",
        choices=(AUTO, FCFS, MLFQ, DEADLINE),
    )
    batch: int | None = setting(
        None,
        "Maximum number of requests in one iteration (default: the engine's limit).",
        "--batch",
        "N",
        minimum=1,
    )
    first_quantum_s: float | None = setting(
        None,
        "Service time in seconds after which a request leaves the first queue (default: the shortest iteration).",
        "--quantum",
        "SECONDS",
        exclusive_minimum=0,
        unused_by_policies=_VLLM_POLICIES,
    )
    levels: int | None = setting(
        None, "Number of queues (default: enough for the longest prefill).", minimum=1
    )
    eta: int = setting(
        1,
        "Minimum number of queues by which a demotion lowers a request.",
        "--eta",
        "N",
        minimum=1,
        unused_by_policies=_VLLM_POLICIES,
    )
    alpha_s: float = setting(
        0.3,
        "Move a request to the first queue after this many seconds without service, to prevent starvation.",
        "--alpha",
        "SECONDS",
        minimum=0,
        unused_by_policies=_VLLM_POLICIES,
    )
    mlfq: MlfqVariant = setting(  # noqa: RUF009 - it returns a dataclass field
        "tempered",
        "Variant of skip-join-mlfq: paper is the algorithm of FastServe, with a fixed starvation limit and unlimited"
        " promotions; tempered raises the limit with the load and with each promotion, and promotes few requests at a time,"
        " so that the queues do not become round robin under overload.",
        "--mlfq",
        "VARIANT",
        choices=MLFQ_VARIANTS,
        unused_by_policies=_VLLM_POLICIES,
    )
    oldest_share: float = setting(
        0.0,
        "Share of time in which requests are served in arrival order; a larger share delays long requests less.",
        "--oldest-share",
        "SHARE",
        minimum=0,
        maximum=1,
        unused_by_policies=_VLLM_POLICIES,
    )
    reserve_quantile: float = setting(
        0.9,
        "Quantile of the KV demand of recent arrivals during one KV load. This much KV memory is kept free for new requests,"
        " and requests that would run last are evicted for this.",
        "--reserve",
        "QUANTILE",
        minimum=0,
        maximum=1,
        unused_by_policies=_VLLM_POLICIES,
    )
    strategy: KvStrategy | None = setting(  # noqa: RUF009 - it returns a dataclass field
        None,
        "What to do with KV cache that does not fit in device memory: proactive swaps it ahead of use, reactive swaps it on"
        " demand, recompute drops it and computes it again (default: proactive).",
        "--kv-strategy",
        choices=STRATEGIES,
        unused_by_policies=_VLLM_POLICIES,
    )
    host_bytes: int | None = setting(
        None,
        "Host memory in bytes for the KV of evicted requests (default: the size of the device's KV memory).",
        "--kv-host-memory",
        "BYTES",
        minimum=0,
        unused_by_policies=_VLLM_POLICIES,
    )
    factor: float = setting(
        24.0,
        "With --scheduler deadline, the deadline of a request is its arrival plus FACTOR times its prefill time; with a larger"
        " FACTOR, more short prompts overtake a long prompt.",
        "--deadline-factor",
        "FACTOR",
        minimum=0,
        unused_by_policies=(FCFS, MLFQ),
    )
    slo_s: float | None = setting(
        None,
        "Target time to first token for --scheduler deadline, in seconds; a request is overtaken only while its own prefill"
        " can still meet it. Default: no target.",
        "--deadline-slo",
        "SECONDS",
        exclusive_minimum=0,
        unused_by_policies=(FCFS, MLFQ),
    )
    classes: str | None = setting(
        None,
        "TOML file of request classes for --scheduler deadline. A request that sets no priority gets that of the class"
        " of its API key or header. Default: no classes.",
        "--deadline-classes",
        "FILE",
        unused_by_policies=(FCFS, MLFQ),
        is_live_only=True,
    )
    profile: Mapping[str, object] | None = setting(None, "Iteration times by size, in seconds.")

    def __post_init__(self) -> None:
        if self.policy == AUTO:
            object.__setattr__(self, "policy", FCFS)
        if self.classes is not None:
            # The server may run in another directory, and JSON has no paths.
            object.__setattr__(self, "classes", str(Path(self.classes).absolute()))

    @classmethod
    def from_additional_config(cls, additional_config: object) -> SchedulerSettings:
        """Read the settings from the parsed value of --additional-config, and check them.

        Raises:
            ValueError: A field is unknown, or a value has the wrong type or is out of range.
        """
        values = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
        known = {one.name for one in fields(cls)}
        if not isinstance(values, Mapping) or set(values) - known:
            raise ValueError(f"{KEY} must be an object with only these fields: {', '.join(sorted(known))}")
        settings = msgspec.convert(values, cls)
        settings.check()
        return settings

    def build_additional_config(self) -> dict[str, object]:
        """Return the value of --additional-config, without host_bytes, which is part of --kv-transfer-config."""
        default = type(self)()
        changed = {name: value for name, value in asdict(self).items() if value != getattr(default, name)}
        changed.pop("host_bytes", None)
        return {KEY: {"policy": self.policy, **changed}}

    @property
    def alpha_growth(self) -> float:
        """Return the minimum starvation limit, as a multiple of the time to give every request one iteration."""
        return {"paper": 0.0, "tempered": 4.0}[self.mlfq]

    @property
    def promoted_share(self) -> float:
        """Return the maximum share of the batch for promoted requests in the first queue; infinity means no limit."""
        return {"paper": inf, "tempered": 0.25}[self.mlfq]

    @property
    def kv_strategy(self) -> str:
        return (self.strategy or "proactive") if self.policy == MLFQ else "recompute"

    def get_iteration_profile(self) -> IterationProfile:
        return FALLBACK_PROFILE if self.profile is None else IterationProfile.parse(self.profile)

    def create_deadline_policy(self, cache_tokens: int) -> DeadlinePolicy:
        """Create the deadline policy for a server whose prefix cache has `cache_tokens` tokens."""
        return DeadlinePolicy(self.get_iteration_profile(), self.factor, self.slo_s, cache_tokens)

    def check(self) -> None:
        """Raise ValueError if a value is out of range."""
        for name, one in list_settings(self):
            one.require_valid(name, getattr(self, name))

    def check_command_line(self) -> None:
        """Raise ValueError if a value is out of range, or if the policy or KV strategy ignores a changed setting."""
        self.check()
        default = type(self)()
        changed = [
            (name, one)
            for name, one in list_command_options()
            if getattr(self, name) != getattr(default, name)
        ]
        for name, one in changed:
            if self.policy in one.unused_by_policies:
                accepted = [
                    o.flag for _, o in list_command_options() if self.policy not in o.unused_by_policies
                ]
                raise ValueError(
                    f"cannot use {one.flag} with {self.policy}, which accepts only {', '.join(accepted[1:])};"
                    f" use --scheduler {next(name for name in (MLFQ, DEADLINE) if name not in one.unused_by_policies)}"
                )
            strategies = _STRATEGIES_USING.get(name, STRATEGIES)
            if self.policy == MLFQ and self.kv_strategy not in strategies:
                raise ValueError(
                    f"cannot use {one.flag} with --kv-strategy {self.kv_strategy}, which ignores it;"
                    f" use --kv-strategy {strategies[0]}"
                )


def uses_deadlines(additional_config: object) -> bool:
    """Return whether vLLM's --additional-config selects the order by deadlines."""
    values = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    return isinstance(values, Mapping) and values.get("policy") == DEADLINE


def list_command_options(*, with_live_only: bool = True) -> Iterator[tuple[str, Setting]]:
    """Yield the fields that have a command-line option; without `with_live_only`, only those that simulated servers use."""
    return (
        (name, one)
        for name, one in list_settings(SchedulerSettings)
        if one.flag and with_live_only >= one.is_live_only
    )
