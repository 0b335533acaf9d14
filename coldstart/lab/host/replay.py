"""Replay of a trace of many models on the simulated host, for `trace-replay --host`.

Model: a request keeps its model busy for its prefill and one decode iteration for each further token, both from one
profile of iteration times with a batch of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from coldstart.bench.report.table import Row, Table
from coldstart.host.configuration import HostFile, load
from coldstart.lab.host.simulate import HostOutcome, HostRequest, Served, simulate
from coldstart.lab.replay.plan import TracePlan
from coldstart.lab.traces import TraceReport, TraceRequest
from coldstart.scheduling import IterationProfile

PERCENTILES = (50, 90, 99)
COLUMNS = ("number", "model", "arrived_s", "hit", "waited_s", "service_s", "ended_s", "status")
"""Columns of the exported table; a rejected request has no wait and no end."""


@dataclass(frozen=True, slots=True)
class HostReplay:
    """Result of a replay, with the configuration of the host."""

    outcome: HostOutcome
    file: HostFile

    @property
    def document(self) -> dict[str, Any]:
        return document(self.outcome, self.file)

    def table(self) -> Table:
        """Return a table with one row per request."""
        return Table(COLUMNS, self._rows)

    def _rows(self) -> Iterator[Row]:
        return (_record(number, one) for number, one in enumerate(self.outcome.requests))


def replay_on_host(
    plan: TracePlan, host: Path, profile: IterationProfile, report: TraceReport, *, series: bool = False
) -> HostReplay:
    """Replay a trace; times in seconds. Rows get the host's models if the plan names none; a page requires `series`."""
    file = load(host)
    names = [spec.name for spec in file.models]
    rows = plan.over(names, host).rows(report)
    outcome = simulate(_requests(rows, profile), file.models, file.settings, series=series)
    return HostReplay(outcome, file)


def _record(number: int, one: Served) -> dict[str, object]:
    return {
        "number": number,
        "model": one.model,
        "arrived_s": one.arrived_s,
        "hit": one.hit,
        "waited_s": one.waited_s if one.waited_s < inf else None,
        "service_s": one.service_s,
        "ended_s": one.ended_s if one.ended_s < inf else None,
        "status": one.status,
    }


def _requests(rows: Iterator[TraceRequest], profile: IterationProfile) -> Iterator[HostRequest]:
    for row in rows:
        seconds = profile.prefill(row.prompt_tokens) + (row.output_tokens - 1) * profile.decode(1)
        yield HostRequest(row.arrival_s, str(row.model), seconds)


def document(outcome: HostOutcome, file: HostFile) -> dict[str, Any]:
    """Return the result document of a replay.

    It contains hit ratio, starts, waits by percentile, rejections by status, and the same for each model.
    """
    by_model: dict[str, list[Served]] = {spec.name: [] for spec in file.models}
    for one in outcome.requests:
        by_model[one.model].append(one)
    return {
        "kind": "simulated host",
        "policy": file.settings.policy,
        "requests": len(outcome.requests),
        "refused": dict(Counter(str(one.status) for one in outcome.requests if one.status != 200)),
        "hit_ratio": outcome.hit_ratio,
        "starts": outcome.starts,
        "departures": outcome.departures,
        "start_s": outcome.start_s,
        "peak_memory_bytes": outcome.peak_memory,
        "duration_s": outcome.end_s,
        "wait_s": _waits(outcome.requests),
        "models": {name: _of_model(served) for name, served in by_model.items()},
    }


def _of_model(served: list[Served]) -> dict[str, Any]:
    return {"requests": len(served), "hits": sum(one.hit for one in served), "wait_s": _waits(served)}


def _waits(served: list[Served]) -> dict[str, float]:
    return percentiles([one.waited_s for one in served if one.waited_s < inf])


def percentiles(values: list[float]) -> dict[str, float]:
    """Return mean, PERCENTILES and maximum; empty without values."""
    if not values:
        return {}
    points = np.percentile(values, PERCENTILES)
    named = {f"p{percent}": float(value) for percent, value in zip(PERCENTILES, points, strict=True)}
    return {"mean": float(np.mean(values)), **named, "max": max(values)}


def text(found: dict[str, Any]) -> str:
    """Format the result document as text."""
    lines = [
        *summary(found),
        f"{'model':<28}{'requests':>9}{'hits':>7}{'wait mean':>11}{'p90':>9}{'max':>9}  (s)",
    ]
    for name, requests, hits, mean, p90, longest in rows(found):
        lines.append(f"{name:<28}{requests:>9}{hits:>7}{mean:>11}{p90:>9}{longest:>9}")
    return "\n".join(lines)


def summary(found: dict[str, Any]) -> list[str]:
    """Return the result in two sentences."""
    return [
        f"simulated host, policy {found['policy']}: {found['requests']} requests, "
        f"{100 * found['hit_ratio']:.1f} % to a model that was ready",
        f"starts {found['starts']} ({found['start_s']:.1f} s in all), departures {found['departures']}, "
        f"refused {sum(found['refused'].values())}",
    ]


def rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield for all and for each model: name, requests, hits, and mean, 90th percentile and maximum of the wait (s)."""
    for name, row in [("all", found), *found["models"].items()]:
        hits = row.get("hits", round(found["hit_ratio"] * found["requests"]))
        waits = [f"{row['wait_s'].get(key, 0.0):.2f}" for key in ("mean", "p90", "max")]
        yield (name, str(row["requests"]), str(hits), *waits)
