"""Scheduler settings, declared once for the command line, the server's arguments and the simulated engine.

Each field of `SchedulerSettings` carries a `Setting` with its help, option, unit and range.
Invariant: an unknown field or a value out of range is an error that names it, so no setting is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from coldstart.scheduling.declaration import Setting, list_settings, setting

if TYPE_CHECKING:
    from coldstart.scheduling.deadline import Deadlines
    from coldstart.scheduling.profile import IterationProfile

KEY = "coldstart_scheduler"
"""Member of vLLM's --additional-config that has the settings."""

FCFS, MLFQ, DEADLINE = "fcfs", "skip-join-mlfq", "deadline"
AUTO = "auto"
"""The default of the command line; selects FCFS."""

MlfqForm = Literal["tempered", "paper"]
FORMS = get_args(MlfqForm)

KvStrategy = Literal["proactive", "reactive", "recompute"]
STRATEGIES = get_args(KvStrategy)

# The reserve limits loads ahead of need, and recompute stores nothing on the host.
_STOCK = (FCFS, DEADLINE)
_STRATEGIES_WITH = {"reserve_quantile": STRATEGIES[:1], "host_bytes": STRATEGIES[:2]}


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Policy and its settings; a field without an option is set only by vLLM's --additional-config.

    `alpha_s` is FastServe's starvation limit. On its own, it turns the queues into round robin once every request waits longer
    than the limit. The tempered limit is therefore max(alpha_s, alpha_scale * time in which every request can have one
    iteration), and at most `promoted_cap` * batch promoted requests are in the first queue at a time.
    """

    policy: str = setting(
        MLFQ,
        "Scheduling policy: fcfs, vLLM's order of arrival; deadline, vLLM's order of priority, the arrival plus a multiple of"
        " the prefill time; skip-join-mlfq, which preempts long requests; auto, which is fcfs.",
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
    mlfq: MlfqForm = setting(  # noqa: RUF009 - it returns a dataclass field
        "tempered",
        "Form of skip-join-mlfq: paper is FastServe's, with a fixed starvation limit and unlimited promotions; tempered lets"
        " the limit grow with load and with each promotion of a request, and promotes few requests at a time, or the queues"
        " become round robin under overload.",
        "--mlfq",
        "FORM",
        choices=FORMS,
        unused_by=_STOCK,
    )
    alpha_scale: float | None = setting(
        None,
        "Starvation limit at least this number of times the time in which every request can have one iteration (default: 4,"
        " with --mlfq paper 0).",
        "--alpha-scale",
        "FACTOR",
        least=0,
        unused_by=_STOCK,
    )
    promoted_cap: float | None = setting(
        None,
        "Maximum share of the batch that promoted requests in the first queue may take (default: 0.25; no limit with --mlfq"
        " paper).",
        "--promoted",
        "SHARE",
        least=0,
        unused_by=_STOCK,
    )
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
        "Quantile of the KV memory that recent arrivals needed within the time of one load; this amount is kept free for new"
        " requests, by eviction of those that would run last.",
        "--reserve",
        "QUANTILE",
        least=0,
        most=1,
        unused_by=_STOCK,
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
        "Host memory in bytes for the KV of evicted requests (default: the size of the device's KV memory; none with fcfs or"
        " deadline).",
        "--kv-host-memory",
        "BYTES",
        least=0,
    )
    factor: float = setting(
        64.0,
        "With --scheduler deadline, the deadline of a request is its arrival plus FACTOR times its prefill time; a larger"
        " FACTOR lets more short prompts pass a long one.",
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
    classes: str | None = setting(
        None,
        "TOML file of classes for --scheduler deadline, which are served by priority: a request that gives none has that of the"
        " class of its API key or of a header. Default: no classes.",
        "--deadline-classes",
        "FILE",
        unused_by=(FCFS, MLFQ),
        live=True,
    )
    shadow_s: float | None = setting(
        None,
        "Predict every so many seconds, from the latest requests, what deadline would gain over fcfs on this traffic, or fcfs"
        " over deadline; in the log and in /metrics. Default: no prediction.",
        "--shadow",
        "SECONDS",
        least=1,
        unused_by=(MLFQ,),
        live=True,
    )
    profile: Mapping[str, object] | None = setting(None, "Iteration times by size, in seconds.")

    def __post_init__(self) -> None:
        if self.policy == AUTO:
            object.__setattr__(self, "policy", FCFS)
        if self.classes is not None:
            # The server may run in another directory, and JSON has no paths.
            object.__setattr__(self, "classes", str(Path(self.classes).absolute()))

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
    def alpha_growth(self) -> float:
        """Return `alpha_scale`, or that of the form."""
        return {"paper": 0.0, "tempered": 4.0}[self.mlfq] if self.alpha_scale is None else self.alpha_scale

    @property
    def promoted_share(self) -> float:
        """Return `promoted_cap`, or that of the form; infinity is no limit."""
        return {"paper": inf, "tempered": 0.25}[self.mlfq] if self.promoted_cap is None else self.promoted_cap

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
        for name, one in list_settings(self):
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


def wants_in_front(additional_config: object) -> tuple[bool, bool]:
    """Return whether a value of vLLM's --additional-config asks for deadlines, and whether for a shadow."""
    given = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    known = given if isinstance(given, Mapping) else {}
    return known.get("policy") == DEADLINE, known.get("shadow_s") is not None


def options(*, live: bool = True) -> Iterator[tuple[str, Setting]]:
    """Yield the fields that have a command-line option, of a server or of a simulated one."""
    return ((name, one) for name, one in list_settings(SchedulerSettings) if one.flag and live >= one.live)
