"""Percentiles, SLO attainment and goodput over request records.

Equations: attainment = requests within every limit of the SLO / all requests that ended (failures count as
misses); goodput = requests within the SLO per second of replay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from coldstart.lab.replay.record import RequestRecord
from coldstart.lab.replay.store import LAG, METRICS, Column, RecordStore

PERCENTILES = (50, 90, 95, 99)


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
        limit, value = getattr(self, name), getattr(record, name)
        return limit is None or value is None or value <= limit


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks of an ordered, non-empty sequence."""
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def distribution(ordered: Column) -> dict[str, float] | None:
    """Mean, extremes and PERCENTILES; None for no values."""
    if not ordered:
        return None
    marks = {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    return {"mean": ordered.mean, "min": ordered[0], **marks, "max": ordered[-1]}


def summarize(records: RecordStore, slo: Slo, duration_s: float) -> dict[str, object]:
    """The result of a replay, ready for JSON; attainment and goodput are None where no SLO was given."""
    ended, good, limits = len(records), records.completed, slo.limits()
    met = sum(map(slo.met, records)) if limits else 0
    span = max(duration_s, 1e-9)
    return {
        "requests": ended,
        "completed": good,
        "failed": records.failed,
        "duration_s": duration_s,
        "requests_per_s": good / span,
        "output_tokens_per_s": records.output_tokens / span,
        **{name: distribution(records.column(name)) for name in METRICS},
        "client_lag_s": distribution(records.column(LAG)),
        "slo": {"limits": limits, "attainment": met / ended if ended else 0.0} if limits else None,
        "goodput_per_s": met / span if limits else None,
    }
