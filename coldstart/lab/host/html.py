"""HTML page of a replay on the simulated host: tables, residents and waiting requests over time, distribution of waits."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np

from coldstart.bench.report import plots
from coldstart.bench.report.page import embedded, items, page, plot, section, table
from coldstart.lab.host.replay import HostReplay, rows, summary
from coldstart.lab.host.simulate import HostOutcome, Served

Levels = np.ndarray[Any, np.dtype[np.float64]]
HEADERS = ("model", "requests", "hits", "wait mean (s)", "p90", "max")
MOST = 4000
"""Maximum number of points of a series; a longer series is sampled at equal steps."""

POINTS = 200
MOST_MODELS = 7
"""Number of models whose waits are drawn: those with the most requests."""


def render(replay: HostReplay) -> str:
    """Return the complete page; requires a replay with its series."""
    found = replay.document
    parts = [
        items(summary(found)),
        table(HEADERS, rows(found)),
        section("Over time", _over_time(replay.outcome, replay.file.settings.memory)),
    ]
    waits = {"all": _waits(replay.outcome.requests)}
    often = sorted(found["models"], key=lambda name: -found["models"][name]["requests"])
    for name in often[:MOST_MODELS]:
        waits[name] = _waits([one for one in replay.outcome.requests if one.model == name])
    waits = {name: points for name, points in waits.items() if points}
    if any(value > 0 for points in waits.values() for value, _ in points):
        parts.append(section("Wait for a model", plot(plots.distributions(waits, "wait"))))
    parts.append(f'<script type="application/json" id="host">{embedded(found)}</script>')
    return page(f"trace-replay on a host, policy {found['policy']}", *parts)


def _over_time(outcome: HostOutcome, memory: int) -> str:
    if not outcome.series:
        return ""
    # The replay ends with the last timer, long after the last change.
    last_s, *level = outcome.series[-1]
    end_s = min(outcome.end_s, 1.05 * last_s)
    time, residents, used, held = _sampled(np.asarray([*outcome.series, (end_s, *level)]))
    taken = plots.Series("used", time, used / 2**30)
    limit = plots.Series("limit", [time[0], time[-1]], [memory / 2**30] * 2)
    return (
        plot(plots.over_time([plots.Series("residents", time, residents)], "models"), "Resident models")
        + plot(plots.over_time([taken, limit], "GiB"), "Memory")
        + plot(
            plots.over_time([plots.Series("waiting", time, held)], "requests"),
            "Requests that wait for a model",
        )
    )


def _sampled(series: Levels) -> Levels:
    """Return the columns of (time, levels...), sampled; each row is valid until the next."""
    if len(series) > MOST:
        steps = np.linspace(series[0, 0], series[-1, 0], MOST)
        series = series[np.searchsorted(series[:, 0], steps, side="right") - 1]
        series[:, 0] = steps
    return series.T


def _waits(served: Sequence[Served]) -> list[tuple[float, float]]:
    waited = [one.waited_s for one in served if one.waited_s < inf]
    if not waited:
        return []
    shares = np.linspace(0.0, 1.0, POINTS + 1)
    return [
        (float(value), float(share)) for value, share in zip(np.quantile(waited, shares), shares, strict=True)
    ]
