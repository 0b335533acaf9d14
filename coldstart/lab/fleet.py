"""Simulator of a fleet that replays a trace: the controller's own core, with links and simulated time instead of processes.

Model: a link moves its bytes in equal shares, background fetches after the others (`network_link`); a rank is loaded
by the model's overlap (`timing`). A request on s ranks with w full ones is slowed by equation 2 and takes its own
prefill and decode times, in parallel with any number of others. A stream that is handed over pauses for `move_s`,
then has the speed of its new group. Stopping takes `stop_s`. Processes die and messages are lost only by `faults`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from coldstart.fleet import events, timing
from coldstart.fleet.core import FleetCore
from coldstart.fleet.events import Action, Event
from coldstart.fleet.groups import name_full_engine
from coldstart.fleet.reservations import NetworkLink
from coldstart.fleet.specification import FleetModel, FleetSettings, ServerSpec
from coldstart.fleet.timing import Costs
from coldstart.lab.loop import Loop, Timer

REST = "+rest"


@dataclass(frozen=True, slots=True)
class FleetRequest:
    """One request: arrival, model, prefill and decode seconds on a full device, and output tokens."""

    arrival_s: float
    model: str
    prefill_s: float
    decode_s: float
    tokens: int


@dataclass(slots=True)
class FleetServed:
    """A request and its result, in seconds of the trace. `cold`: it waited for a start."""

    request: FleetRequest
    cold: bool = False
    sent_s: float = inf
    first_s: float = inf
    ended_s: float = inf
    moves: int = 0
    status: int = 200
    # In its current group: tokens after the first by `since`, seconds per token, and the next event of the request.
    done: float = 0.0
    since: float = 0.0
    pace_s: float = 0.0
    timer: Timer | None = None

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float:
        return (self.ended_s - self.first_s) / max(1, self.request.tokens - 1)


@dataclass(slots=True)
class FleetOutcome:
    """Result of a replay.

    `held_byte_s` is device memory held over time; `fetched` are bytes over links, including background fetches.
    """

    requests: list[FleetServed] = field(default_factory=list)
    starts: int = 0
    workers: int = 0
    ranks: dict[int, int] = field(default_factory=dict)
    moves: int = 0
    fetched: float = 0.0
    held_byte_s: float = 0.0
    end_s: float = 0.0


@dataclass(slots=True)
class _Process:
    """A launched worker and its progress."""

    launch: events.LaunchRank
    began: float
    stopping: bool = False


def simulate(
    requests: Iterable[FleetRequest],
    servers: Sequence[ServerSpec],
    models: Iterable[FleetModel],
    settings: FleetSettings,
    *,
    move_s: float = 0.34,
    stop_s: float = 0.0,
    faults: Sequence[tuple[float, Event]] = (),
    record: list[tuple[float, Event, list[Action]]] | None = None,
) -> FleetOutcome:
    """Replay requests, which must be in order of arrival. `record` receives every event with the resulting actions."""
    fleet = _Fleet(FleetCore(settings, servers, models), servers, move_s, stop_s, record)
    return fleet.replay(requests, faults)


class _Fleet:
    def __init__(
        self,
        core: FleetCore,
        servers: Sequence[ServerSpec],
        move_s: float,
        stop_s: float,
        record: list[tuple[float, Event, list[Action]]] | None,
    ) -> None:
        self.core, self.move_s, self.stop_s, self.record = core, move_s, stop_s, record
        self.outcome = FleetOutcome()
        self.servers = {server.name: server for server in servers}
        self.links = {server.name: NetworkLink(server.network) for server in servers}
        self.processes: dict[str, _Process] = {}
        self.shape: dict[str, tuple[int, int]] = {}
        self._loop = Loop(core.deadline, lambda: self._tell(events.Tick()))
        self._link_timers: dict[str, Timer] = {}
        self._open = 0
        self._home: dict[str, str] = {}
        self._goal: dict[str, str] = {}

    def replay(self, requests: Iterable[FleetRequest], faults: Sequence[tuple[float, Event]]) -> FleetOutcome:
        for time, event in faults:
            self._loop.plan(time, partial(self._fault, event))
        arrivals = ((request.arrival_s, partial(self._arrive, request)) for request in requests)
        self._loop.run(arrivals, is_open=lambda: self._open > 0)
        outcome = self.outcome
        outcome.starts, outcome.moves = self.core.starts, self.core.moves
        outcome.end_s = max((one.ended_s for one in outcome.requests if one.status == 200), default=0.0)
        outcome.fetched = sum(link.moved for link in self.links.values())
        return outcome

    def _arrive(self, request: FleetRequest) -> None:
        served = FleetServed(request)
        self.outcome.requests.append(served)
        self._open += 1
        self._tell(events.Arrived(str(len(self.outcome.requests) - 1), request.model))
        served.cold = served.sent_s == inf

    def _ended(self, request: str) -> None:
        self._home.pop(request, None)
        self._open -= 1
        self._tell(events.Ended(request))

    def _stopped(self, worker: str) -> None:
        if (process := self.processes.pop(worker, None)) is not None:
            self._count(process)
            self._tell(events.Stopped(worker))

    def _report(self, worker: str, event: Event) -> None:
        if self._works(worker):
            self._tell(event)

    def _begin(self, launch: events.LaunchRank) -> None:
        if self._works(launch.worker):
            self._fetch(launch.worker, launch.server, launch.fetch)

    def _works(self, worker: str) -> bool:
        return worker in self.processes and not self.processes[worker].stopping

    def _fault(self, event: Event) -> None:
        match event:
            case events.WorkerDied(worker):
                if worker in self.processes:
                    self._gone(worker)
            case events.ServerLost(server):
                for worker in [w for w, p in self.processes.items() if p.launch.server == server]:
                    self._gone(worker)
        self._tell(event)

    def _gone(self, worker: str) -> None:
        process = self.processes.pop(worker)
        self._count(process)
        self._release(process)
        dead = {process.launch.group, name_full_engine(worker)}
        for request, home in list(self._home.items()):
            if home in dead:
                self._halt(request)
            elif self._goal.get(request) in dead:
                del self._goal[request]
                self._go_on(request, home, self._loop.now + self.move_s)

    def _tell(self, event: Event) -> None:
        now = self._loop.now
        actions = self.core.handle(event, now)
        if self.record is not None:
            self.record.append((now, event, actions))
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        now = self._loop.now
        match action:
            case events.LaunchRank():
                self._launch(action)
            case events.FetchRest(worker, size):
                self._fetch(worker + REST, self.processes[worker].launch.server, size, background=True)
            case events.Stop(worker):
                process = self.processes[worker]
                process.stopping = True
                self._release(process)
                self._loop.plan(now + self.stop_s, partial(self._stopped, worker))
            case events.Release(worker, group):
                self._loop.plan(now, partial(self._report, worker, events.Released(worker, group)))
            case events.Send(request, group):
                self._send(request, group)
            case events.Move(request, _, target):
                self._move(request, target)
            case events.Refuse(request, status):
                served = self._served(request)
                self._open -= 1
                served.status = status
                self._cancel(served)
                self._home.pop(request, None)

    def _launch(self, launch: events.LaunchRank) -> None:
        self.processes[launch.worker] = _Process(launch, self._loop.now)
        self.shape[launch.group] = launch.ranks, launch.full
        self.outcome.workers += 1
        if launch.rank == 0:
            self.outcome.ranks[launch.ranks] = self.outcome.ranks.get(launch.ranks, 0) + 1
        begin = timing.fetch_begin_s(self._costs(launch.model)) if launch.fetch else 0.0
        if begin:
            self._loop.plan(self._loop.now + begin, partial(self._begin, launch))
        else:
            self._fetch(launch.worker, launch.server, launch.fetch)

    def _costs(self, model: str) -> Costs:
        return self.core.models[model].spec.costs

    def _fetch(self, name: str, server: str, size: int, *, background: bool = False) -> None:
        if not size:
            self._loop.plan(self._loop.now, partial(self._arrived, name))
            return
        self._carried(server)
        self.links[server].add(name, size, background=background)
        self._watch(server)

    def _release(self, process: _Process) -> None:
        server = process.launch.server
        self._carried(server)
        for name in (process.launch.worker, process.launch.worker + REST):
            self.links[server].drop(name)
        self._watch(server)

    def _carried(self, server: str) -> None:
        """Move bytes until now; completed fetches continue with an event, not amid the actions being carried out."""
        for name, time in self.links[server].advance(self._loop.now):
            self._loop.plan(time, partial(self._arrived, name))
        self._watch(server)

    def _watch(self, server: str) -> None:
        if server in self._link_timers:
            self._link_timers.pop(server).cancel()
        if (end := self.links[server].next_end()) < inf:
            self._link_timers[server] = self._loop.plan(end, partial(self._carried, server))

    def _arrived(self, name: str) -> None:
        worker, now = name.removesuffix(REST), self._loop.now
        if not self._works(worker):
            return
        process = self.processes[worker]
        launch, load = process.launch, self.servers[process.launch.server].load
        if name.endswith(REST):
            rest = self.core.models[launch.model].spec.size - launch.size
            self._loop.plan(
                now + timing.fetch_s(rest, load), partial(self._report, worker, events.Whole(worker))
            )
            return
        costs = self._costs(launch.model)
        # Weights in host memory are available at once, but the runtime is not.
        begin = timing.fetch_begin_s(costs) if not launch.fetch else 0.0
        after = timing.loaded_after(costs, launch.size, load, max(begin, now - process.began))
        after += costs.join_s * launch.ranks
        self._loop.plan(process.began + after, partial(self._report, worker, events.RankReady(worker)))
        if launch.fetch:
            self._tell(events.Fetched(worker))

    def _count(self, process: _Process) -> None:
        self.outcome.held_byte_s += process.launch.memory * (self._loop.now - process.began)

    def _shape(self, group: str) -> tuple[int, int]:
        return self.shape.get(group, (1, 1))

    def _send(self, request: str, group: str) -> None:
        served, (ranks, full), now = self._served(request), self._shape(group), self._loop.now
        asked = served.request
        costs = self._costs(asked.model)
        own = replace(costs, prefill_s=asked.prefill_s, decode_s=asked.decode_s)
        if served.sent_s == inf:
            served.sent_s = now
        self._go_on(request, group, now + timing.first_token_s(own, ranks, full))
        if served.first_s == inf or served.first_s > now:
            served.first_s = served.since

    def _go_on(self, request: str, group: str, first: float) -> None:
        """Let the request generate tokens in that group from `first` on, until it has all."""
        served, (ranks, full) = self._served(request), self._shape(group)
        asked = served.request
        costs = replace(self._costs(asked.model), decode_s=asked.decode_s)
        self._home[request] = group
        served.since, served.pace_s = first, timing.tpot_s(costs, ranks, full)
        served.ended_s = first + (asked.tokens - 1 - served.done) * served.pace_s
        self._cancel(served)
        served.timer = self._loop.plan(served.ended_s, partial(self._ended, request))

    def _cancel(self, served: FleetServed) -> None:
        if served.timer is not None:
            served.timer.cancel()

    def _halt(self, request: str) -> float:
        """Stop the request's tokens; return when it can continue at the earliest, not before its first token."""
        served, now = self._served(request), self._loop.now
        self._cancel(served)
        if now >= served.since:
            made = (now - served.since) / served.pace_s if served.pace_s else inf
            served.done = min(served.request.tokens - 1.0, served.done + made)
        return max(now, served.since)

    def _move(self, request: str, target: str) -> None:
        moment = self._halt(request)
        served = self._served(request)
        served.moves += 1
        self._goal[request] = target
        served.timer = self._loop.plan(moment + self.move_s, partial(self._resumed, request, target))

    def _resumed(self, request: str, target: str) -> None:
        self._goal.pop(request, None)
        self._go_on(request, target, self._loop.now)
        self._tell(events.Moved(request, True))

    def _served(self, request: str) -> FleetServed:
        return self.outcome.requests[int(request)]
