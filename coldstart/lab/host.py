"""Simulator of a host that replays a trace of many models: the live host's own core, with simulated time.

Model: a start takes the penalty of the tier it starts from, leaving takes `leave_s`. A request occupies its model for
`service_s` seconds from its dispatch, any number at once (vLLM batches them), and a busy model is not evicted. A request of a
trace takes its prefill and one decode iteration for each further token, by one profile of iteration times with a batch of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from coldstart.bench.report.table import Row, Table
from coldstart.host.configuration import HostFile, load
from coldstart.host.core import Core
from coldstart.host.events import (
    Abort,
    Action,
    Arrived,
    Dispatch,
    Ended,
    Event,
    Failed,
    Leave,
    Left,
    Refuse,
    Start,
    Started,
    Tick,
)
from coldstart.host.specification import HostSettings, ModelSpec
from coldstart.lab.loop import Loop, Timer
from coldstart.lab.plan import TracePlan
from coldstart.lab.records import describe
from coldstart.lab.traces import TraceReport, TraceRequest
from coldstart.scheduling import IterationProfile

COLUMNS = ("number", "model", "arrived_s", "hit", "waited_s", "service_s", "ended_s", "status")
"""Columns of the exported table; a rejected request has no wait and no end."""

HEADERS = ("model", "requests", "hits", "wait mean (s)", "p90", "max")


@dataclass(slots=True)
class Served:
    """One request; times in seconds of the trace. `waited_s` is the wait for its model; `status` is that of a rejection."""

    model: str
    arrived_s: float
    service_s: float
    hit: bool = False
    dispatched_s: float = inf
    ended_s: float = inf
    status: int = 200

    @property
    def waited_s(self) -> float:
        return self.dispatched_s - self.arrived_s


@dataclass(slots=True)
class HostOutcome:
    """Result of a replay. `start_s` sums the seconds of all starts: the cost that a policy minimises.

    `series`, if requested, contains each change of (time in s, resident models, their bytes, waiting requests).
    """

    requests: list[Served] = field(default_factory=list)
    starts: int = 0
    departures: int = 0
    start_s: float = 0.0
    end_s: float = 0.0
    peak_memory: int = 0
    series: list[tuple[float, int, int, int]] | None = None

    @property
    def served(self) -> list[Served]:
        return [one for one in self.requests if one.status == 200]

    @property
    def hit_ratio(self) -> float:
        """Return the share of requests whose model was ready when they arrived."""
        return sum(one.hit for one in self.requests) / max(1, len(self.requests))


@dataclass(frozen=True, slots=True)
class HostRequest:
    """One request of a trace: arrival, model, and for how long it keeps the model busy."""

    arrival_s: float
    model: str
    service_s: float


def simulate(
    requests: Iterable[HostRequest],
    specs: Iterable[ModelSpec],
    settings: HostSettings,
    *,
    leave_s: float = 0.0,
    start_s: Callable[[Start], float] | None = None,
    series: bool = False,
) -> HostOutcome:
    """Replay requests, which must be in order of arrival.

    `start_s` returns the seconds of a start instead of the tier's penalty.
    """
    host = _Host(Core(specs, settings), leave_s, start_s or (lambda start: start.tier.penalty_s))
    host.outcome.series = [] if series else None
    return host.replay(requests)


class _Host:
    def __init__(self, core: Core, leave_s: float, start_s: Callable[[Start], float]) -> None:
        self.core, self.leave_s, self.start_s = core, leave_s, start_s
        self.outcome = HostOutcome()
        self._loop = Loop(core.deadline, lambda: self._tell(Tick()))
        self._starting: dict[str, Timer] = {}

    def replay(self, requests: Iterable[HostRequest]) -> HostOutcome:
        self._loop.run((request.arrival_s, partial(self._arrive, request)) for request in requests)
        self.outcome.starts, self.outcome.departures = self.core.starts, self.core.departures
        return self.outcome

    def _arrive(self, request: HostRequest) -> None:
        served = Served(request.model, request.arrival_s, request.service_s)
        self.outcome.requests.append(served)
        hits = self.core.hits
        self._tell(Arrived(str(len(self.outcome.requests) - 1), request.model))
        served.hit = self.core.hits > hits

    def _tell(self, event: Event) -> None:
        self.outcome.end_s = now = self._loop.now
        for action in self.core.handle(event, now):
            self._do(action, now)
        self.outcome.peak_memory = max(self.outcome.peak_memory, self.core.residents.device.used)
        if self.outcome.series is not None:
            self._note(now, self.outcome.series)

    def _note(self, now: float, series: list[tuple[float, int, int, int]]) -> None:
        residents = self.core.residents
        level = (residents.count(), residents.device.used, len(self.core.pending))
        if not series or series[-1][1:] != level:
            series.append((now, *level))

    def _do(self, action: Action, now: float) -> None:
        match action:
            case Start(model):
                seconds = self.start_s(action)
                self.outcome.start_s += seconds
                self._starting[model] = self._later(seconds, Started(model, seconds))
            case Abort(model):
                self._starting.pop(model).cancel()
                self._later(0.0, Failed(model, "the start passed its deadline"))
            case Leave(model):
                self._later(self.leave_s, Left(model))
            case Dispatch(request):
                served = self.outcome.requests[int(request)]
                served.dispatched_s, served.ended_s = now, now + served.service_s
                self._later(served.service_s, Ended(request))
            case Refuse(request, status):
                self.outcome.requests[int(request)].status = status

    def _later(self, seconds: float, event: Event) -> Timer:
        return self._loop.plan(self._loop.now + seconds, partial(self._tell, event))


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


def _requests(rows: Iterable[TraceRequest], profile: IterationProfile) -> Iterator[HostRequest]:
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
        "models": {name: _describe_model(served) for name, served in by_model.items()},
    }


def _describe_model(served: list[Served]) -> dict[str, Any]:
    return {"requests": len(served), "hits": sum(one.hit for one in served), "wait_s": _waits(served)}


def _waits(served: list[Served]) -> dict[str, float]:
    return describe([one.waited_s for one in served if one.waited_s < inf]) or {}


def format_text(found: dict[str, Any]) -> str:
    """Format the result document as text."""
    lines = [
        *summary(found),
        f"{'model':<28}{'requests':>9}{'hits':>7}{'wait mean':>11}{'p90':>9}{'max':>9}  (s)",
    ]
    for name, requests, hits, mean, p90, longest in list_rows(found):
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


def list_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield for all and for each model: name, requests, hits, and mean, 90th percentile and maximum of the wait (s)."""
    for name, row in [("all", found), *found["models"].items()]:
        hits = row.get("hits", round(found["hit_ratio"] * found["requests"]))
        waits = [f"{row['wait_s'].get(key, 0.0):.2f}" for key in ("mean", "p90", "max")]
        yield (name, str(row["requests"]), str(hits), *waits)
