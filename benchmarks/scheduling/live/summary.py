"""Summarize the runs: medians with their range, ratios within each repetition, prices, identical answers.

A ratio above 1 is an improvement over the baseline. It is computed within one repetition, where both served the same
requests. The summary has its median over the repetitions with the smallest and the largest ratio.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.scheduling.live.names import BASELINE, HONEST

Runs = Mapping[int, Mapping[str, Any]]
TIMES = (
    "per_token_s.mean",
    "per_token_s.p95",
    "ttft_s.mean",
    "ttft_s.p95",
    "latency_s.mean",
    "longest_s.mean",
)
RATES = ("tokens_per_s", "makespan_tokens_per_s")

BASELINES = (BASELINE, HONEST)


def groups(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, str], dict[str, dict[int, Any]]]:
    """Rows by (regime, workload, load), then scheduler, then repetition."""
    found: dict[tuple[str, str, str], dict[str, dict[int, Any]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        key = (row["regime"], row["workload"], row["load"])
        found[key][row["scheduler"]][row["repetition"]] = row
    return {key: dict(value) for key, value in found.items()}


def summarize(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry per regime, workload and load."""
    return [
        {"regime": regime, "workload": workload, "load": load, **_cell(schedulers)}
        for (regime, workload, load), schedulers in groups(rows).items()
    ]


def _cell(schedulers: Mapping[str, Runs]) -> dict[str, Any]:
    others = [name for name in schedulers if name != BASELINE]
    return {
        "schedulers": {name: _one(runs) for name, runs in schedulers.items()},
        "against": {
            base: {
                name: _against(runs, schedulers[base]) for name, runs in schedulers.items() if name != base
            }
            for base in BASELINES
            if base in schedulers
        },
        "identical": {name: _identical(schedulers[name], schedulers.get(BASELINE, {})) for name in others},
    }


def _one(runs: Runs) -> dict[str, Any]:
    ordered = [runs[number] for number in sorted(runs)]
    counters = {name: median(run["counters"][name] for run in ordered) for name in ordered[0]["counters"]}
    metrics = {name: spread([run["metrics"][name] for run in ordered]) for name in ordered[0]["metrics"]}
    requests = sum(len(run["requests"]) for run in ordered)
    return {"runs": len(ordered), "requests": requests, "metrics": metrics, "counters": counters}


def _against(runs: Runs, base: Runs) -> dict[str, Any]:
    both = sorted(set(runs) & set(base))
    if not both:
        return {}
    ratios = {name: spread([_ratio(base[n], runs[n], name) for n in both]) for name in TIMES}
    ratios |= {name: spread([_ratio(runs[n], base[n], name) for n in both]) for name in RATES}
    return ratios | {"slowdown": slowdown([runs[n] for n in both], [base[n] for n in both])}


def slowdown(runs: Sequence[Any], base: Sequence[Any]) -> dict[str, float]:
    """Latency over the baseline's, request by request: the price that single requests pay."""
    factors = sorted(
        mine[2] / theirs[2]
        for run, other in zip(runs, base, strict=True)
        for mine, theirs in zip(run["requests"], other["requests"], strict=True)
    )
    return {"max": factors[-1], "p99": factors[int(0.99 * (len(factors) - 1))]}


def _identical(runs: Runs, base: Runs) -> dict[str, int]:
    pairs = [
        (mine[3], theirs[3])
        for number in set(runs) & set(base)
        for mine, theirs in zip(runs[number]["requests"], base[number]["requests"], strict=True)
    ]
    return {"compared": len(pairs), "identical": sum(a == b != "" for a, b in pairs)}


def _ratio(over: Any, under: Any, name: str) -> float:
    return float(over["metrics"][name] / under["metrics"][name])


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}
