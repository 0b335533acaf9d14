"""Scheduler settings, declared once for the command line, the server's arguments and the simulated engine.

Each field of `SchedulerSettings` carries a `Setting` with its help, option, unit and range.
Invariant: an unknown member or a value out of range is an error that names it, so no setting is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Literal, get_args

from coldstart.scheduling.declaration import Setting, setting

if TYPE_CHECKING:
    from coldstart.scheduling.deadline import Deadlines
    from coldstart.scheduling.profile import IterationProfile

KEY = "coldstart_scheduler"
"""Member of vLLM's --additional-config that has the settings."""

FCFS, MLFQ, DEADLINE = "fcfs", "skip-join-mlfq", "deadline"
AUTO = "auto"
"""The default of the command line; selects FCFS."""

KvStrategy = Literal["proactive", "reactive", "recompute"]
STRATEGIES = get_args(KvStrategy)

# The reserve limits loads ahead of need, and recompute stores nothing on the host.
_STOCK = (FCFS, DEADLINE)
_STRATEGIES_WITH = {"reserve_quantile": STRATEGIES[:1], "host_bytes": STRATEGIES[:2]}


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Policy and its settings; a field without an option is set only by vLLM's --additional-config.

    `alpha_s` is FastServe's starvation limit. On its own, it turns the queues into round robin once every
    request waits longer than the limit. The limit in force is therefore max(alpha_s, alpha_scale * active /
    batch * decode time). At most `promoted_cap` * batch promoted requests are in the first queue at a time.
    `alpha_scale` 0 without a cap is the paper's policy.
    """

    policy: str = setting(
        MLFQ,
        "Scheduling policy: fcfs is vLLM's own scheduler, first come, first served; deadline is vLLM's own scheduler, and each"
        " request's priority is its arrival plus a multiple of its prefill time; skip-join-mlfq preempts long requests; auto"
        " selects fcfs.",
        "--scheduler",
        "NAME",
        choices=(AUTO, FCFS, MLFQ, DEADLINE),
    )
    batch: int | None = setting(
        None,
        "Maximum number of requests in one iteration (default: the engine's limit).",
        "--batch",
        "N",
        least=1,
    )
    first_quantum_s: float | None = setting(
        None,
        "Service time in seconds after which a request leaves the first queue (default: the shortest iteration).",
        "--quantum",
        "SECONDS",
        above=0,
        unused_by=_STOCK,
    )
    levels: int | None = setting(None, "Number of queues (default: enough for the longest prefill).", least=1)
    growth: float = setting(2.0, "Quantum of a queue divided by that of the queue before it.", above=1)
    eta: int = setting(
        1,
        "Minimum number of queues that a demotion moves a request down.",
        "--eta",
        "N",
        least=1,
        unused_by=_STOCK,
    )
    alpha_s: float = setting(
        0.3,
        "Time in seconds without service after which a request moves to the first queue; prevents starvation.",
        "--alpha",
        "SECONDS",
        least=0,
        unused_by=_STOCK,
    )
    alpha_scale: float = setting(4.0, "Factor by which the starvation limit grows with load.", least=0)
    promoted_cap: float | None = setting(
        0.25, "Maximum share of the batch for promoted requests (None: no limit).", least=0
    )
    demote_to_head: bool = setting(False, "Place a demoted request at the head of its new queue.")
    oldest_share: float = setting(
        0.0,
        "Share of the time that serves requests in order of arrival; a larger share delays long requests less.",
        "--oldest-share",
        "SHARE",
        least=0,
        most=1,
        unused_by=_STOCK,
    )
    reserve_quantile: float = setting(
        0.9,
        "Quantile of the KV memory of recent arrivals; this amount remains free for new requests.",
        "--reserve",
        "QUANTILE",
        least=0,
        most=1,
        unused_by=_STOCK,
    )
    load_latency_s: float = setting(
        0.05, "Time in seconds that a load from host memory takes; window of the reserve.", above=0
    )
    strategy: KvStrategy | None = setting(  # noqa: RUF009 - it returns a dataclass field
        None,
        "Handling of KV that does not fit in device memory: proactive swaps it ahead of need, reactive on demand, recompute"
        " drops it (default: proactive).",
        "--kv-strategy",
        choices=STRATEGIES,
        unused_by=_STOCK,
    )
    host_bytes: int | None = setting(
        None,
        "Host memory in bytes for the KV of evicted requests (default: the size of the device's KV memory; with fcfs and"
        " deadline none).",
        "--kv-host-memory",
        "BYTES",
        least=0,
    )
    factor: float = setting(
        32.0,
        "Multiple of the prefill time by which the deadline of --scheduler deadline lies after the arrival; a larger one lets"
        " more short prompts pass a long one.",
        "--deadline-factor",
        "FACTOR",
        least=0,
        unused_by=(FCFS, MLFQ),
    )
    slo_s: float | None = setting(
        None,
        "Time in seconds within which --scheduler deadline wants each first token; a prompt is passed only as long as its own"
        " prefill still fits.",
        "--deadline-slo",
        "SECONDS",
        above=0,
        unused_by=(FCFS, MLFQ),
    )
    profile: Mapping[str, object] | None = setting(None, "Iteration times by size, in seconds.")

    def __post_init__(self) -> None:
        if self.policy == AUTO:
            object.__setattr__(self, "policy", FCFS)

    @classmethod
    def read(cls, additional_config: object) -> SchedulerSettings:
        """Return the settings that `additional_config()` wrote.

        Raises:
            ValueError: A member is unknown, or a value is out of range.
        """
        given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
        known = {one.name for one in fields(cls)}
        if not isinstance(given, Mapping) or set(given) - known:
            raise ValueError(f"{KEY} must be an object with members among {', '.join(sorted(known))}")
        settings = cls(**given)
        settings.check()
        return settings

    def additional_config(self) -> dict[str, object]:
        """Return the value of --additional-config, without host_bytes, which --kv-transfer-config carries."""
        default = type(self)()
        changed = {name: value for name, value in asdict(self).items() if value != getattr(default, name)}
        changed.pop("host_bytes", None)
        return {KEY: {"policy": self.policy, **changed}}

    @property
    def kv_strategy(self) -> str:
        if self.strategy:
            return self.strategy
        return "recompute" if self.policy in _STOCK and not self.host_bytes else "proactive"

    def iteration_profile(self) -> IterationProfile:
        from coldstart.scheduling.profile import FALLBACK_PROFILE, IterationProfile

        return FALLBACK_PROFILE if self.profile is None else IterationProfile.parse(self.profile)

    def deadlines(self, cache_tokens: int) -> Deadlines:
        """Return the deadlines of a server whose prefix cache has so many tokens."""
        from coldstart.scheduling.deadline import Deadlines

        return Deadlines(self.iteration_profile(), self.factor, self.slo_s, cache_tokens)

    def check(self) -> None:
        """Raise ValueError for a value out of range."""
        for name, one in list_declarations():
            one.require(name, getattr(self, name))

    def check_command_line(self) -> None:
        """Raise ValueError for a value out of range, or for a changed setting that the policy or the KV strategy ignores."""
        self.check()
        default = type(self)()
        changed = [(name, one) for name, one in options() if getattr(self, name) != getattr(default, name)]
        for name, one in changed:
            if self.policy in one.unused_by:
                *rest, last = [o.flag for _, o in options() if self.policy not in o.unused_by][1:]
                raise ValueError(
                    f"cannot use {one.flag} with {self.policy}, which accepts only {', '.join(rest)} and {last};"
                    f" use --scheduler {next(name for name in (MLFQ, DEADLINE) if name not in one.unused_by)}"
                )
            strategies = _STRATEGIES_WITH.get(name, STRATEGIES)
            if self.policy == MLFQ and self.kv_strategy not in strategies:
                raise ValueError(
                    f"cannot use {one.flag} with --kv-strategy {self.kv_strategy}, which ignores it;"
                    f" use --kv-strategy {strategies[0]}"
                )


def list_declarations() -> Iterator[tuple[str, Setting]]:
    """Yield each field's name and declaration."""
    return ((one.name, one.metadata["setting"]) for one in fields(SchedulerSettings))


def options() -> Iterator[tuple[str, Setting]]:
    """Yield the fields that have a command-line option."""
    return ((name, one) for name, one in list_declarations() if one.flag)
