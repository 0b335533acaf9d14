"""Measurements of each request of a replay, and their summary: percentiles, SLO attainment and goodput.

Live replays and simulations produce the same kind of records.

Equations: attainment = requests that meet every SLO limit / all ended requests (failures count as misses);
goodput = requests that meet the SLO per second of replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame, Series

METRICS = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "normalized_s": "per token",
    "latency_s": "end to end",
    "wait_s": "until sent",
}
"""Metrics of a request with their labels. Only `wait_s` also covers failed requests."""
SLO_METRICS = ("ttft", "tpot", "normalized", "latency")
"""Metrics that an SLO can limit; the name of each in METRICS ends in `_s`."""
PERCENTILES = (50, 90, 95, 99)
STATISTICS = ("mean", *(f"p{percent}" for percent in PERCENTILES), "max")


@dataclass(slots=True)
class RequestRecord:
    """Measurements of one request. Times are in seconds since the start of the replay.

    Latencies count from `due_s`, the scheduled arrival, so that delays of the client do not make the server look faster.
    `cold` is True if the request waited for its model to start, and None if that is unknown.
    """

    number: int
    due_s: float
    prompt_tokens: int
    wanted_tokens: int
    model: str | None = None
    target: str = ""
    sent_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    output_tokens: int = 0
    error: str | None = None
    cold: bool | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.finished_s is not None and self.output_tokens > 0

    @property
    def ttft_s(self) -> float | None:
        """Return the time from the scheduled arrival to the first token, in seconds."""
        return None if self.first_token_s is None else self.first_token_s - self.due_s

    @property
    def latency_s(self) -> float | None:
        return None if self.finished_s is None else self.finished_s - self.due_s


SloLimits = Mapping[str | None, Mapping[str, float]]
"""SLO limits in seconds by model and metric; the model None applies to all models not listed."""


@dataclass(slots=True)
class Replay:
    """Result of a replay. `end_reason` is 'complete', 'interrupted', 'terminated' or 'target dead'.

    The records are in the order of the trace. Only a simulation sets `counts` and `limits` (its SLO).
    """

    records: list[RequestRecord] = field(default_factory=list)
    duration_s: float = 0.0
    end_reason: str = "complete"
    counts: dict[str, Any] = field(default_factory=dict)
    limits: SloLimits = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """Request to a simulated host or fleet, with its prefill time and its time per token on an otherwise idle device."""

    arrival_s: float
    model: str
    prefill_s: float
    seconds_per_token: float = 0.0
    tokens: int = 1
    prompt_tokens: int = 0

    @property
    def service_s(self) -> float:
        """Return the time from dispatch to the last token, in seconds."""
        return self.prefill_s + (self.tokens - 1) * self.seconds_per_token

    def create_record(self, number: int) -> RequestRecord:
        """Return an empty record for this request."""
        return RequestRecord(number, self.arrival_s, self.prompt_tokens, self.tokens, self.model, "simulated")


def tabulate(records: Iterable[RequestRecord]) -> DataFrame:
    """Return a table with one row per record: its fields, `ok` and all metrics.

    TPOT is unknown for a response of one token. The normalized latency is defined in FastServe, section 6.1. `wait_s` is
    the client's delay or, in a simulation, the time spent waiting for the model.
    """
    from pandas import DataFrame

    names = [*(one.name for one in fields(RequestRecord)), "ok", "ttft_s", "latency_s"]
    frame = DataFrame([[getattr(one, name) for name in names] for one in records], columns=names)
    times = [name for name in names if name.endswith("_s")]
    frame = frame.astype(dict.fromkeys(times, float) | {"ok": bool, "output_tokens": int})
    tokens = frame["output_tokens"]
    later = (frame["finished_s"] - frame["first_token_s"]) / (tokens - 1)
    frame["tpot_s"] = later.where(tokens > 1)
    frame["normalized_s"] = (frame["latency_s"] / tokens).where(tokens > 0)
    frame["wait_s"] = frame["sent_s"] - frame["due_s"]
    return frame


def describe(values: Series | Sequence[float]) -> dict[str, float] | None:
    """Return the mean, minimum, maximum and PERCENTILES of those values that are not NaN, or None if there are none."""
    from pandas import Series

    known = Series(values, dtype=float).dropna()
    if known.empty:
        return None
    marks = {f"p{percent}": float(known.quantile(percent / 100)) for percent in PERCENTILES}
    return {"mean": float(known.mean()), "min": float(known.min()), **marks, "max": float(known.max())}


def summarize(frame: DataFrame, limits: SloLimits, duration_s: float) -> dict[str, Any]:
    """Return the JSON summary of a replay. If there are several models, `models` has one summary per model.

    Attainment and goodput are None without an SLO. `cold_share` is None if no request records whether it was cold.
    """
    summary = _summarize(frame, limits, duration_s)
    if len(by_model := frame.groupby("model")) > 1:
        default_limit = limits.get(None, {})
        summary["models"] = {
            name: _summarize(part, {name: limits.get(name, default_limit)}, duration_s)
            for name, part in by_model
        }
    return summary


def _summarize(frame: DataFrame, limits: SloLimits, duration_s: float) -> dict[str, Any]:
    good, total, span = frame[frame["ok"]], max(1, len(frame)), max(duration_s, 1e-9)
    within, cold = _check_slo(good, limits), frame["cold"].dropna()
    met = int(within.all(axis=1).sum())
    slo = {
        "limits": {model or "all": dict(of_model) for model, of_model in limits.items()},
        "attainment": met / total,
        "by_metric": {name: int(within[name].sum()) / total for name in within},
    }
    return {
        "requests": len(frame),
        "completed": len(good),
        "failed": int(frame["error"].notna().sum()),
        "duration_s": duration_s,
        "requests_per_s": len(good) / span,
        "output_tokens_per_s": float(good["output_tokens"].sum()) / span,
        **{name: describe((frame if name == "wait_s" else good)[name]) for name in METRICS},
        "cold_share": float(cold.astype(float).mean()) if len(cold) else None,
        "slo": slo if len(within.columns) else None,
        "goodput_per_s": met / span if len(within.columns) else None,
    }


def _check_slo(good: DataFrame, limits: SloLimits) -> DataFrame:
    """Return a boolean table that states, by SLO metric, whether each request meets its model's limit."""
    from pandas import DataFrame

    within = DataFrame(index=good.index)
    for name in sorted({name for of_model in limits.values() for name in of_model}):
        default_limit = limits.get(None, {}).get(name, inf)
        limit_by_model = {model: of_model.get(name, default_limit) for model, of_model in limits.items()}
        within[name] = ~good[name].gt(good["model"].map(limit_by_model).astype(float).fillna(default_limit))
    return within
