"""A trace of many models on a simulated host: the live host's own core, with time in the place of processes.

Model: a start takes the penalty of the tier it starts from, leaving takes `leave_s`; a request occupies its model for
`service(request)` seconds from its dispatch, any number at once (vLLM batches them), and a busy model stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
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


@dataclass(slots=True)
class Served:
    """One request; times in seconds of the trace. `waited` is for its model; refused ones have a status."""

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
    """What a replay came to. `start_s` sums the starts' seconds: the cost that a policy is to keep low.

    `series` has, where it was asked for, each change of (time in s, resident models, their bytes, requests that wait).
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
        """Requests whose model served when they arrived, of all."""
        return sum(one.hit for one in self.requests) / max(1, len(self.requests))


@dataclass(frozen=True, slots=True)
class HostRequest:
    """One row of a trace: when, which model, and for how long it keeps the model busy."""

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
    """Replay requests that arrive in order. `start_s` gives a start's seconds where they are not the tier's."""
    host = _Host(Core(specs, settings), leave_s, start_s or (lambda start: start.tier.penalty_s))
    host.outcome.series = [] if series else None
    return host.replay(requests)


class _Host:
    def __init__(self, core: Core, leave_s: float, start_s: Callable[[Start], float]) -> None:
        self.core, self.leave_s, self.start_s = core, leave_s, start_s
        self.outcome = HostOutcome()
        self._due: list[tuple[float, int, Event]] = []
        self._number, self._starting = 0, dict[str, int]()

    def replay(self, requests: Iterable[HostRequest]) -> HostOutcome:
        for request in requests:
            self._until(request.arrival_s)
            self._arrive(request)
        self._until(inf)
        self.outcome.starts, self.outcome.departures = self.core.starts, self.core.departures
        return self.outcome

    def _until(self, end: float) -> None:
        """Let everything happen that is due before `end`."""
        while True:
            happens, tick = self._due[0][0] if self._due else inf, self.core.deadline()
            if min(happens, tick) > end or min(happens, tick) == inf:
                return
            if tick < happens:
                self._tell(Tick(), max(tick, self.outcome.end_s))
                continue
            time, number, event = heappop(self._due)
            if not isinstance(event, Started) or self._starting.pop(event.model, None) == number:
                self._tell(event, time)

    def _arrive(self, request: HostRequest) -> None:
        served = Served(request.model, request.arrival_s, request.service_s)
        self.outcome.requests.append(served)
        hits = self.core.hits
        self._tell(Arrived(str(len(self.outcome.requests) - 1), request.model), request.arrival_s)
        served.hit = self.core.hits > hits

    def _tell(self, event: Event, now: float) -> None:
        self.outcome.end_s = now
        for action in self.core.on(event, now):
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
                self._starting[model] = self._later(now + seconds, Started(model, seconds))
            case Abort(model):
                self._starting.pop(model, None)
                self._later(now, Failed(model, "the start passed its deadline"))
            case Leave(model):
                self._later(now + self.leave_s, Left(model))
            case Dispatch(request):
                self._dispatch(request, now)
            case Refuse(request, status):
                self._served(request).status = status

    def _dispatch(self, request: str, now: float) -> None:
        served = self._served(request)
        served.dispatched_s, served.ended_s = now, now + served.service_s
        self._later(served.ended_s, Ended(request))

    def _served(self, request: str) -> Served:
        return self.outcome.requests[int(request)]

    def _later(self, time: float, event: Event) -> int:
        self._number += 1
        heappush(self._due, (time, self._number, event))
        return self._number
