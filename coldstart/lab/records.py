"""Measurements of each request of a replay, and their summary: percentiles, SLO attainment and goodput.

A live replay and each simulation give the same records, and so the same summary.

Equations: attainment = requests within every limit of the SLO / all requests that ended (failures count as misses);
goodput = requests within the SLO per second of replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf
from typing import TYPE_CHECKING, Any

from coldstart.errors import UsageError

if TYPE_CHECKING:
    from pandas import DataFrame, Series

METRICS = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "normalized_s": "per token",
    "latency_s": "end to end",
    "wait_s": "until sent",
}
"""Metrics of a request with their labels. `wait_s` covers failed requests too."""
PERCENTILES = (50, 90, 95, 99)
MARKS = ("mean", *(f"p{percent}" for percent in PERCENTILES), "max")


@dataclass(slots=True)
class RequestRecord:
    """Measurements of one request in seconds from the replay's start.

    Latencies count from `due_s`, the time in the trace, so that a late client does not improve the server's result.
    `cold`: it waited for a start of its model; None where that is unknown.
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
        """Return the time to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.due_s

    @property
    def latency_s(self) -> float | None:
        return None if self.finished_s is None else self.finished_s - self.due_s


Limits = Mapping[str | None, Mapping[str, float]]
"""An SLO: limits in seconds by metric for each model; None: for all others."""


@dataclass(slots=True)
class Replay:
    """Result of a replay: `ended` is 'complete', 'interrupted' or 'target dead'.

    The records are in order of the trace. `counts` are further results of a simulation, and `limits` its SLO.
    """

    records: list[RequestRecord] = field(default_factory=list)
    duration_s: float = 0.0
    ended: str = "complete"
    counts: dict[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One request of a simulated host or fleet: seconds of its prefill and of each token on a device of its own."""

    arrival_s: float
    model: str
    prefill_s: float
    decode_s: float = 0.0
    tokens: int = 1
    prompt_tokens: int = 0

    @property
    def service_s(self) -> float:
        """Return the seconds from its dispatch to its last token."""
        return self.prefill_s + (self.tokens - 1) * self.decode_s

    def record(self, number: int) -> RequestRecord:
        """Return the record of this request, as it is before the request is sent."""
        return RequestRecord(number, self.arrival_s, self.prompt_tokens, self.tokens, self.model, "simulated")


def tabulate(records: Iterable[RequestRecord]) -> DataFrame:
    """Return one row for each record, with `ok` and all metrics.

    The time per output token after the first (TPOT) is unknown for a response of one token. The normalized latency is that
    of FastServe, section 6.1. `wait_s` is the client's delay, or in a simulation the wait for the model.
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


def parse_slo(text: str) -> dict[str, float]:
    """Parse 'ttft=2,tpot=0.1,normalized=0.3,latency=60' to limits in seconds by metric. Raises UsageError."""
    limits: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        key = f"{name.strip()}_s"
        try:
            limits[key] = float(value)
        except ValueError:
            limits[key] = 0.0
        if key not in METRICS or key == "wait_s" or not limits[key] > 0:
            raise UsageError(
                f"--slo {part!r}: expected ttft=, tpot=, normalized= or latency= with seconds above 0",
                hint="write limits in seconds: --slo ttft=2,tpot=0.1",
            )
    return limits


def describe(values: Series | Sequence[float]) -> dict[str, float] | None:
    """Return mean, extremes and PERCENTILES of the known values; None without values."""
    from pandas import Series

    known = Series(values, dtype=float).dropna()
    if known.empty:
        return None
    marks = {f"p{percent}": float(known.quantile(percent / 100)) for percent in PERCENTILES}
    return {"mean": float(known.mean()), "min": float(known.min()), **marks, "max": float(known.max())}


def summarize(frame: DataFrame, limits: Limits, duration_s: float) -> dict[str, Any]:
    """Return the result of a replay, ready for JSON; `models` has that of each model if there are several.

    Attainment and goodput are None without an SLO, and the share of cold requests where it is unknown.
    """
    found = _summarize(frame, limits, duration_s)
    if len(by_model := frame.groupby("model")) > 1:
        every = limits.get(None, {})
        found["models"] = {
            name: _summarize(part, {name: limits.get(name, every)}, duration_s) for name, part in by_model
        }
    return found


def _summarize(frame: DataFrame, limits: Limits, duration_s: float) -> dict[str, Any]:
    good, total, span = frame[frame["ok"]], max(1, len(frame)), max(duration_s, 1e-9)
    within, cold = _judge(good, limits), frame["cold"].dropna()
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


def _judge(good: DataFrame, limits: Limits) -> DataFrame:
    """Return for each request, and each metric of the SLO, whether it is within the limit of its model."""
    from pandas import DataFrame

    within = DataFrame(index=good.index)
    for name in sorted({name for of_model in limits.values() for name in of_model}):
        every = limits.get(None, {}).get(name, inf)
        most = {model: of_model.get(name, every) for model, of_model in limits.items()}
        within[name] = ~good[name].gt(good["model"].map(most).astype(float).fillna(every))
    return within
