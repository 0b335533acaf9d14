"""Measurements of each request of a replay, and their summary: percentiles, SLO attainment, goodput and a comparison.

Equations: attainment = requests within every limit of the SLO / all requests that ended (failures count as misses);
goodput = requests within the SLO per second of replay. A ratio to a baseline is baseline / this for times and this /
baseline for rates, so that above 1 is always better.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame, Series

METRICS = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "normalized_s": "per token",
    "latency_s": "end to end",
    "lag_s": "client lag",
}
"""Metrics of a request with their labels. The lag is that of the client and covers failed requests too."""
PERCENTILES = (50, 90, 95, 99)
MARKS = ("mean", *(f"p{percent}" for percent in PERCENTILES), "max")
RATES = ("requests_per_s", "output_tokens_per_s", "goodput_per_s")
COLUMNS = (
    "number", "model", "target", "due_s", "sent_s", "first_token_s", "finished_s", "prompt_tokens", "wanted_tokens",
    "output_tokens", "error", "ttft_s", "tpot_s", "normalized_s", "latency_s",
)  # fmt: skip
"""Columns of the exported table."""


@dataclass(slots=True)
class RequestRecord:
    """Measurements of one request in seconds from the replay's start.

    Latencies count from `due_s`, the time in the trace, so that a late client does not improve the server's result.
    `answer` is a digest of the answer's token ids, if the replay requested them.
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
    answer: str | None = None
    error: str | None = None

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

    @property
    def tpot_s(self) -> float | None:
        """Return the time per output token after the first; None for answers of one token."""
        if self.finished_s is None or self.first_token_s is None or self.output_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def normalized_s(self) -> float | None:
        """Return the end-to-end latency per output token (FastServe, section 6.1)."""
        return (
            None if self.latency_s is None or not self.output_tokens else self.latency_s / self.output_tokens
        )

    @property
    def lag_s(self) -> float | None:
        """Return how late the client sent the request."""
        return None if self.sent_s is None else self.sent_s - self.due_s


def tabulate(records: Iterable[RequestRecord]) -> DataFrame:
    """Return one row for each record, with `ok` and all metrics."""
    from pandas import DataFrame

    names = [*COLUMNS, "lag_s", "ok"]
    frame = DataFrame([[getattr(one, name) for name in names] for one in records], columns=names)
    times = [name for name in names if name.endswith("_s")]
    return frame.astype(dict.fromkeys(times, float) | {"ok": bool})


def list_records(frame: DataFrame) -> list[dict[str, object]]:
    """Return the rows of the exported table; an unknown value is None."""
    cells = frame.astype(object)
    return [dict(row) for row in cells.where(cells.notna(), None).to_dict("records")]


def parse_slo(text: str) -> dict[str, float]:
    """Parse 'ttft=2,tpot=0.1,normalized=0.3,latency=60' to limits in seconds by metric. Raises ValueError."""
    limits: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        key = f"{name.strip()}_s"
        if key not in METRICS or key == "lag_s":
            raise ValueError(f"SLO {part!r}: write ttft=, tpot=, normalized= or latency= with seconds")
        limits[key] = float(value)
        if not limits[key] > 0:
            raise ValueError(f"SLO {part!r}: the limit must be above zero")
    return limits


def describe(values: Series | Sequence[float]) -> dict[str, float] | None:
    """Return mean, extremes and PERCENTILES of the known values; None without values."""
    from pandas import Series

    known = Series(values, dtype=float).dropna()
    if known.empty:
        return None
    marks = {f"p{percent}": float(known.quantile(percent / 100)) for percent in PERCENTILES}
    return {"mean": float(known.mean()), "min": float(known.min()), **marks, "max": float(known.max())}


def summarize(frame: DataFrame, limits: Mapping[str, float], duration_s: float) -> dict[str, Any]:
    """Return the result of a replay, ready for JSON; attainment and goodput are None without an SLO."""
    good, span = frame[frame["ok"]], max(duration_s, 1e-9)
    met = (
        len(good.query(" and ".join(f"not {name} > {limit!r}" for name, limit in limits.items())))
        if limits
        else 0
    )
    return {
        "requests": len(frame),
        "completed": len(good),
        "failed": int(frame["error"].notna().sum()),
        "duration_s": duration_s,
        "requests_per_s": len(good) / span,
        "output_tokens_per_s": float(good["output_tokens"].sum()) / span,
        **{name: describe(good[name]) for name in METRICS if name != "lag_s"},
        "client_lag_s": describe(frame["lag_s"]),
        "slo": {"limits": dict(limits), "attainment": met / max(1, len(frame))} if limits else None,
        "goodput_per_s": met / span if limits else None,
    }


def compare(this: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, float]:
    """Return ratios by 'metric.mark', without metrics that are missing in one of the two or zero. Raises ValueError."""
    if "requests" not in baseline:
        raise ValueError("the baseline is not a trace-replay result: it has no 'requests'")
    times = {
        f"{metric}.{mark}": ((baseline.get(metric) or {}).get(mark), (this.get(metric) or {}).get(mark))
        for metric in METRICS
        for mark in ("mean", "p50", "p95", "p99")
    }
    pairs = times | {rate: (this.get(rate), baseline.get(rate)) for rate in RATES}
    return {name: over / under for name, (over, under) in pairs.items() if over is not None and under}


def list_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """Return one row per metric: its label, then MARKS in seconds."""
    found = ((label, summary.get(name.replace("lag_s", "client_lag_s"))) for name, label in METRICS.items())
    return [[label, *(f"{marks[mark]:.4g}" for mark in MARKS)] for label, marks in found if marks]


def format_text(summary: Mapping[str, Any], ratios: Mapping[str, float] | None = None) -> str:
    """Return the table with its rates below, and the ratios to a baseline."""
    rows = [["seconds", *MARKS], *list_rows(summary)]
    lines = [f"{row[0]:<12}" + "".join(f"{cell:>10}" for cell in row[1:]) for row in rows]
    lines.append(format_rates(summary))
    if ratios:
        lines.append("compared with the baseline (above 1 is better):")
        lines += [f"  {name:<22}{ratio:>8.2f}x" for name, ratio in ratios.items()]
    return "\n".join(lines)


def format_rates(summary: Mapping[str, Any]) -> str:
    """Return counts and rates in one line; SLO attainment and goodput if an SLO was given."""
    slo = summary["slo"]
    judged = (
        f", SLO attainment {slo['attainment']:.1%}, goodput {summary['goodput_per_s']:.3g} requests/s"
        if slo
        else ""
    )
    return (
        f"{summary['completed']} of {summary['requests']} requests, {summary['failed']} failed; "
        f"{summary['requests_per_s']:.3g} requests/s, {summary['output_tokens_per_s']:.4g} tokens/s{judged}"
    )
