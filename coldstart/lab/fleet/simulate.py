"""Simulator of a fleet that replays a trace: the controller's own core, with links and simulated time instead of processes.

Model: a link moves its bytes in equal shares, background fetches after the others (`network_link`); a rank is loaded
by the model's overlap (`timing`). A request on s ranks with w full ones is slowed by equation 2 and takes its own
prefill and decode times, in parallel with any number of others. A stream that is handed over pauses for `move_s`,
then has the speed of its new group. Stopping takes `stop_s`. Processes die and messages are lost only by `faults`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf

from coldstart.fleet import events, timing
from coldstart.fleet.core import FleetCore
from coldstart.fleet.events import Action, Event
from coldstart.fleet.groups import name_full_engine
from coldstart.fleet.reservations import NetworkLink
from coldstart.fleet.specification import FleetModel, FleetSettings, ServerSpec
from coldstart.fleet.timing import Costs

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
    # In its current group: tokens after the first by `since`, seconds per token, number of its valid end
    # event.
    done: float = 0.0
    since: float = 0.0
    pace_s: float = 0.0
    version: int = 0

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
    fetched: float | None = None
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
        self._link_version = dict.fromkeys(self.links, 0)
        self._due: list[tuple[float, int, str, object]] = []
        self._number = self._open = 0
        self._home: dict[str, str] = {}
        self._goal: dict[str, str] = {}

    def replay(self, requests: Iterable[FleetRequest], faults: Sequence[tuple[float, Event]]) -> FleetOutcome:
        for time, event in faults:
            self._later(time, "tell", event)
        for request in requests:
            self._until(request.arrival_s)
            self.outcome.requests.append(FleetServed(request))
            self._open += 1
            name = str(len(self.outcome.requests) - 1)
            self._tell(events.Arrived(name, request.model), request.arrival_s)
            served = self.outcome.requests[-1]
            served.cold = served.sent_s == inf
        self._until(inf)
        self.outcome.starts, self.outcome.moves = self.core.starts, self.core.moves
        self.outcome.end_s = max(
            (one.ended_s for one in self.outcome.requests if one.status == 200), default=0.0
        )
        self.outcome.fetched = sum(link.moved for link in self.links.values())
        return self.outcome

    def _until(self, end: float) -> None:
        """Process all events that are due before `end`; with infinity, those that are due while a request is open."""
        while end < inf or self._open:
            happens, tick = self._due[0][0] if self._due else inf, self.core.deadline()
            if min(happens, tick) > end or min(happens, tick) == inf:
                return
            if tick < happens:
                self._tell(events.Tick(), max(tick, self.outcome.end_s))
                continue
            time, _, kind, what = heappop(self._due)
            self._happen(time, kind, what)

    def _happen(self, time: float, kind: str, what: object) -> None:
        match kind, what:
            case "link", (str(server), int(version)):
                if self._link_version.get(server) == version:
                    self._carried(server, time)
            case "end", (str(request), int(version)):
                if self._served(request).version == version:
                    self._home.pop(request, None)
                    self._open -= 1
                    self._tell(events.Ended(request), time)
            case "moved", (str(request), str(target), int(version)):
                if self._served(request).version == version:
                    self._resumed(request, target, time)
            case "begin", str(worker):
                if self._works(worker):
                    launch = self.processes[worker].launch
                    self._fetch(worker, launch.server, launch.fetch, time)
            case "arrived", str(name):
                if self._works(name.removesuffix(REST)):
                    self._arrived(name, time)
            case "worker", events.Stopped(worker):
                if (process := self.processes.pop(worker, None)) is not None:
                    self._count(process, time)
                    self._tell(events.Stopped(worker), time)
            case "worker", (
                events.RankReady(worker) | events.Whole(worker) | events.Released(worker)
            ) as event:
                if self._works(worker):
                    self._tell(event, time)
            case "tell", _:
                self._fault(what, time)  # type: ignore[arg-type]

    def _works(self, worker: str) -> bool:
        return worker in self.processes and not self.processes[worker].stopping

    def _fault(self, event: Event, time: float) -> None:
        match event:
            case events.WorkerDied(worker):
                if worker in self.processes:
                    self._gone(worker, time)
            case events.ServerLost(server):
                for worker in [w for w, p in self.processes.items() if p.launch.server == server]:
                    self._gone(worker, time)
        self._tell(event, time)

    def _gone(self, worker: str, time: float) -> None:
        process = self.processes.pop(worker)
        self._count(process, time)
        self._release(process, time)
        dead = {process.launch.group, name_full_engine(worker)}
        for request, home in list(self._home.items()):
            if home in dead:
                self._halt(request, time)
            elif self._goal.get(request) in dead:
                del self._goal[request]
                self._go_on(request, home, time + self.move_s)

    def _tell(self, event: Event, now: float) -> None:
        self.outcome.end_s = now
        actions = self.core.handle(event, now)
        if self.record is not None:
            self.record.append((now, event, actions))
        for action in actions:
            self._do(action, now)

    def _do(self, action: Action, now: float) -> None:
        match action:
            case events.LaunchRank():
                self._launch(action, now)
            case events.FetchRest(worker, size):
                self._fetch(worker + REST, self.processes[worker].launch.server, size, now, background=True)
            case events.Stop(worker):
                process = self.processes[worker]
                process.stopping = True
                self._release(process, now)
                self._later(now + self.stop_s, "worker", events.Stopped(worker))
            case events.Release(worker, group):
                self._later(now, "worker", events.Released(worker, group))
            case events.Send(request, group):
                self._send(request, group, now)
            case events.Move(request, _, target):
                self._move(request, target, now)
            case events.Refuse(request, status):
                served = self._served(request)
                self._open -= 1
                served.status, served.version = status, served.version + 1
                self._home.pop(request, None)

    def _launch(self, launch: events.LaunchRank, now: float) -> None:
        self.processes[launch.worker] = _Process(launch, now)
        self.shape[launch.group] = launch.ranks, launch.full
        self.outcome.workers += 1
        if launch.rank == 0:
            self.outcome.ranks[launch.ranks] = self.outcome.ranks.get(launch.ranks, 0) + 1
        begin = timing.fetch_begin_s(self._costs(launch.model)) if launch.fetch else 0.0
        if begin:
            self._later(now + begin, "begin", launch.worker)
        else:
            self._fetch(launch.worker, launch.server, launch.fetch, now)

    def _costs(self, model: str) -> Costs:
        return self.core.models[model].spec.costs

    def _fetch(self, name: str, server: str, size: int, now: float, *, background: bool = False) -> None:
        if not size:
            self._later(now, "arrived", name)
            return
        self._carried(server, now)
        self.links[server].add(name, size, background=background)
        self._watch(server)

    def _release(self, process: _Process, now: float) -> None:
        server = process.launch.server
        self._carried(server, now)
        for name in (process.launch.worker, process.launch.worker + REST):
            self.links[server].drop(name)
        self._watch(server)

    def _carried(self, server: str, now: float) -> None:
        """Move bytes until now; completed fetches continue with an event, not amid the actions being carried out."""
        for name, time in self.links[server].advance(now):
            self._later(time, "arrived", name)
        self._watch(server)

    def _watch(self, server: str) -> None:
        self._link_version[server] += 1
        if (end := self.links[server].next_end()) < inf:
            self._later(end, "link", (server, self._link_version[server]))

    def _arrived(self, name: str, now: float) -> None:
        worker = name.removesuffix(REST)
        process = self.processes[worker]
        launch, load = process.launch, self.servers[process.launch.server].load
        if name.endswith(REST):
            rest = self.core.models[launch.model].spec.size - launch.size
            self._later(now + timing.fetch_s(rest, load), "worker", events.Whole(worker))
            return
        process.fetched = now
        costs = self._costs(launch.model)
        # Weights in host memory are available at once, but the runtime is not.
        begin = timing.fetch_begin_s(costs) if not launch.fetch else 0.0
        after = timing.loaded_after(costs, launch.size, load, max(begin, now - process.began))
        after += costs.join_s * launch.ranks
        self._later(process.began + after, "worker", events.RankReady(worker))
        if launch.fetch:
            self._tell(events.Fetched(worker), now)

    def _count(self, process: _Process, now: float) -> None:
        self.outcome.held_byte_s += process.launch.memory * (now - process.began)

    def _shape(self, group: str) -> tuple[int, int]:
        return self.shape.get(group, (1, 1))

    def _send(self, request: str, group: str, now: float) -> None:
        served, (ranks, full) = self._served(request), self._shape(group)
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
        served.version += 1
        self._later(served.ended_s, "end", (request, served.version))

    def _halt(self, request: str, now: float) -> float:
        """Stop the request's tokens; return when it can continue at the earliest, not before its first token."""
        served = self._served(request)
        served.version += 1
        if now >= served.since:
            made = (now - served.since) / served.pace_s if served.pace_s else inf
            served.done = min(served.request.tokens - 1.0, served.done + made)
        return max(now, served.since)

    def _move(self, request: str, target: str, now: float) -> None:
        moment = self._halt(request, now)
        served = self._served(request)
        served.moves += 1
        self._goal[request] = target
        self._later(moment + self.move_s, "moved", (request, target, served.version))

    def _resumed(self, request: str, target: str, now: float) -> None:
        self._goal.pop(request, None)
        self._go_on(request, target, now)
        self._tell(events.Moved(request, True), now)

    def _served(self, request: str) -> FleetServed:
        return self.outcome.requests[int(request)]

    def _later(self, time: float, kind: str, what: object) -> None:
        self._number += 1
        heappush(self._due, (time, self._number, kind, what))
