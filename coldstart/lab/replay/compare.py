"""Two replays side by side.

Equation: ratio = baseline / this for times, this / baseline for rates, so that above 1 is always better.
"""

from __future__ import annotations

from collections.abc import Mapping

TIMES = ("ttft_s", "tpot_s", "normalized_s", "latency_s")
RATES = ("requests_per_s", "output_tokens_per_s", "goodput_per_s")
MARKS = ("mean", "p50", "p95", "p99")


def compare(this: Mapping[str, object], baseline: Mapping[str, object]) -> dict[str, float]:
    """Ratios by 'metric.mark', without metrics that either lacks or that are zero. Raises ValueError."""
    if "requests" not in baseline:
        raise ValueError("the baseline is not a trace-replay result: it has no 'requests'")
    times = ((f"{metric}.{mark}", metric, mark) for metric in TIMES for mark in MARKS)
    ratios = {name: _ratio(_mark(baseline, m, k), _mark(this, m, k)) for name, m, k in times}
    ratios |= {rate: _ratio(_number(this.get(rate)), _number(baseline.get(rate))) for rate in RATES}
    return {name: ratio for name, ratio in ratios.items() if ratio is not None}


def _mark(summary: Mapping[str, object], metric: str, mark: str) -> float | None:
    marks = summary.get(metric)
    return _number(marks.get(mark)) if isinstance(marks, Mapping) else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or not under else over / under
