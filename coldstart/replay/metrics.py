"""Percentiles, SLO attainment and goodput over request records.

Equations: attainment = requests within every limit of the SLO / all requests that ended (failures count as
misses); goodput = requests within the SLO per second of replay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from coldstart.replay.record import RequestRecord

PERCENTILES = (50, 90, 95, 99)
METRICS: dict[str, Callable[[RequestRecord], float | None]] = {
    "ttft_s": lambda r: r.ttft_s,
    "tpot_s": lambda r: r.tpot_s,
    "normalized_s": lambda r: r.normalized_s,
    "latency_s": lambda r: r.latency_s,
}


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper limits in seconds; None means no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    normalized_s: float | None = None
    latency_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """From 'ttft=2,tpot=0.1,normalized=0.3,latency=60'. Raises ValueError."""
        limits: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            key = f"{name.strip()}_s"
            if key not in METRICS:
                raise ValueError(f"SLO {part!r}: write ttft=, tpot=, normalized= or latency= with seconds")
            limits[key] = float(value)
            if not limits[key] > 0:
                raise ValueError(f"SLO {part!r}: the limit must be above zero")
        return cls(**limits)

    def met(self, record: RequestRecord) -> bool:
        return record.ok and all(self._within(name, record) for name in METRICS)

    def limits(self) -> dict[str, float]:
        return {name: limit for name in METRICS if (limit := getattr(self, name)) is not None}

    def _within(self, name: str, record: RequestRecord) -> bool:
        limit, value = getattr(self, name), METRICS[name](record)
        return limit is None or value is None or value <= limit


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks of an ordered, non-empty sequence."""
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def distribution(values: Iterable[float | None]) -> dict[str, float] | None:
    """Mean, extremes and PERCENTILES; None for no values."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    marks = {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    return {"mean": math.fsum(ordered) / len(ordered), "min": ordered[0], **marks, "max": ordered[-1]}


def summarize(records: Sequence[RequestRecord], slo: Slo, duration_s: float) -> dict[str, object]:
    """The result of a replay, ready for JSON."""
    good = [record for record in records if record.ok]
    met = sum(map(slo.met, records))
    span = max(duration_s, 1e-9)
    return {
        "requests": len(records),
        "completed": len(good),
        "failed": sum(record.error is not None for record in records),
        "duration_s": duration_s,
        "requests_per_s": len(good) / span,
        "output_tokens_per_s": sum(record.output_tokens for record in good) / span,
        **{name: distribution(map(metric, good)) for name, metric in METRICS.items()},
        "client_lag_s": distribution(record.lag_s for record in records),
        "slo": {"limits": slo.limits(), "attainment": met / len(records) if records else 0.0},
        "goodput_per_s": met / span,
    }
