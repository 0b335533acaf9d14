"""Simulator of a host that replays a trace of many models: the live host's own core, with simulated time.

Model: a start takes the penalty of the tier it starts from, leaving takes `leave_s`. A request occupies its model for
`service_s` seconds from its dispatch, any number at once (vLLM batches them), and a busy model is not evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import inf

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
