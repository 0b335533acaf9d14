"""Simulator of a fleet that replays a trace: the controller's own core, with links and simulated time instead of processes.

Model: a link moves its bytes in equal shares, background fetches after the others (`network_link`); a rank is loaded
by the model's overlap (`timing`). A request on s ranks with w full ones is slowed by equation 2 and takes its own
prefill and decode times, in parallel with any number of others. A stream that is handed over pauses for `move_s`,
then has the speed of its new group. Stopping takes `stop_s`. Processes die and messages are lost only by `faults`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from coldstart.fleet import events, sizing
from coldstart.fleet.core import FleetCore
from coldstart.fleet.events import Action, Event
from coldstart.fleet.reservations import NetworkLink
from coldstart.fleet.roster import Roster
from coldstart.fleet.specification import Costs, FleetModel, FleetSettings, ServerSpec
from coldstart.lab.loop import Call, Loop, Timer
from coldstart.lab.records import ModelRequest, Replay, RequestRecord


@dataclass(slots=True)
class _Stream:
    """A request with its record; in its current group: tokens after the first by `since`, and seconds per token."""

    request: ModelRequest
    record: RequestRecord
    done: float = 0.0
    since: float = 0.0
    pace_s: float = 0.0
    timer: Timer | None = None


@dataclass(slots=True)
class _Process:
    """A launched worker and its progress."""

    launch: events.LaunchRank
    began: float
    stopping: bool = False


def simulate(
    requests: Iterable[ModelRequest],
    servers: Sequence[ServerSpec],
    models: Iterable[FleetModel],
    settings: FleetSettings,
    *,
    move_s: float = 0.34,
    stop_s: float = 0.0,
    faults: Sequence[tuple[float, Event]] = (),
    roster: Roster | None = None,
    record: list[tuple[float, Event, list[Action]]] | None = None,
    core: type[FleetCore] = FleetCore,
) -> Replay:
    """Replay requests, which must be in order of arrival. `record` receives every event with the resulting actions.

    `core` is a subclass that measures its decisions. The SLO is that of the models. Of the counts, `fetched_bytes` are bytes
    over links, including background fetches.
    """
    fleet = _Fleet(core(settings, servers, models, roster), servers, move_s, stop_s, record)
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
        self.streams: list[_Stream] = []
        self._workers = self._moved = 0
        self._ranks = Counter[int]()
        self.servers = {server.name: server for server in servers}
        self.links = {server.name: NetworkLink(server.network) for server in servers}
        self.processes: dict[str, _Process] = {}
        self.shape: dict[str, tuple[int, int]] = {}
        self._loop = Loop(core.deadline, lambda: self._tell(events.Tick()))
        self._link_timers: dict[str, Timer] = {}
        self._open = 0
        self._home: dict[str, str] = {}
        self._goal: dict[str, str] = {}

    def replay(self, requests: Iterable[ModelRequest], faults: Sequence[tuple[float, Event]]) -> Replay:
        for time, event in faults:
            self._loop.plan(time, partial(self._fault, event))
        arrivals = ((request.arrival_s, partial(self._arrive, request)) for request in requests)
        self._loop.run(arrivals, is_open=lambda: self._open > 0)
        records = [stream.record for stream in self.streams]
        counts = {
            "servers": len(self.servers),
            "starts": self.core.starts,
            "workers": self._workers,
            "groups_by_ranks": {str(ranks): count for ranks, count in sorted(self._ranks.items())},
            "streams_moved": self._moved,
            "fetched_bytes": sum(link.moved for link in self.links.values()),
        }
        limits: dict[str | None, dict[str, float]] = {}
        for name, model in self.core.models.items():
            both = {"ttft_s": model.spec.ttft_s, "tpot_s": model.spec.tpot_s}
            limits[name] = {metric: limit for metric, limit in both.items() if limit < inf}
        end = max((one.finished_s or 0.0 for one in records), default=0.0)
        return Replay(records, end, counts=counts, limits=limits)

    def _arrive(self, request: ModelRequest) -> None:
        record = request.record(len(self.streams))
        self.streams.append(_Stream(request, record))
        self._open += 1
        self._tell(events.Arrived(str(record.number), request.model))
        record.cold = record.sent_s is None

    def _ended(self, request: str) -> None:
        stream = self.streams[int(request)]
        stream.record.finished_s, stream.record.output_tokens = self._loop.now, stream.request.tokens
        self._home.pop(request, None)
        self._open -= 1
        self._tell(events.Ended(request))

    def _stopped(self, worker: str) -> None:
        if self.processes.pop(worker, None) is not None:
            self._tell(events.Stopped(worker))

    def _continue(self, worker: str, call: Call) -> None:
        if self._works(worker):
            call()

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
        self._release(process)
        dead = process.launch.group
        for request, home in list(self._home.items()):
            if home == dead:
                self._halt(request)
            elif self._goal.get(request) == dead:
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
            case events.Stop(worker):
                process = self.processes[worker]
                process.stopping = True
                self._release(process)
                self._loop.plan(now + self.stop_s, partial(self._stopped, worker))
            case events.Dispatch(request, group):
                self._send(request, group)
            case events.Move(request, _, target):
                self._move(request, target)
            case events.Refuse(request, status, reason):
                stream = self.streams[int(request)]
                self._open -= 1
                stream.record.error = f"HTTP {status}: {reason}"
                self._cancel(stream)
                self._home.pop(request, None)

    def _launch(self, launch: events.LaunchRank) -> None:
        now = self._loop.now
        self.processes[launch.worker] = _Process(launch, now)
        self.shape[launch.group] = launch.ranks, launch.full
        if launch.beside:
            self._fetch(launch.worker, launch.server, launch.fetch, background=True)
            return
        self._workers += 1
        self._ranks[launch.ranks] += launch.rank == 0
        fetch = partial(self._fetch, launch.worker, launch.server, launch.fetch)
        begin = sizing.fetch_begin_s(self._costs(launch.model)) if launch.fetch else 0.0
        if begin:
            self._loop.plan(now + begin, partial(self._continue, launch.worker, fetch))
        else:
            fetch()

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
        self.links[server].drop(process.launch.worker)
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

    def _arrived(self, worker: str) -> None:
        now = self._loop.now
        if not self._works(worker):
            return
        process = self.processes[worker]
        launch, load = process.launch, self.servers[process.launch.server].load
        ready = partial(self._continue, worker, partial(self._tell, events.RankReady(worker)))
        if launch.beside:
            rest = launch.size - self.processes[launch.beside].launch.size
            self._loop.plan(now + sizing.fetch_s(rest, load), ready)
            return
        costs = self._costs(launch.model)
        # Weights in host memory are available at once, but the runtime is not.
        begin = sizing.fetch_begin_s(costs) if not launch.fetch else 0.0
        after = sizing.loaded_after(costs, launch.size, load, max(begin, now - process.began))
        after += costs.join_s * launch.ranks
        self._loop.plan(process.began + after, ready)
        if launch.fetch:
            self._tell(events.Fetched(worker))

    def _shape(self, group: str) -> tuple[int, int]:
        return self.shape.get(group, (1, 1))

    def _send(self, request: str, group: str) -> None:
        stream, (ranks, full), now = self.streams[int(request)], self._shape(group), self._loop.now
        asked, record = stream.request, stream.record
        own = replace(self._costs(asked.model), prefill_s=asked.prefill_s, decode_s=asked.decode_s)
        if record.sent_s is None:
            record.sent_s = now
        self._go_on(request, group, now + sizing.first_token_s(own, ranks, full))
        if record.first_token_s is None or record.first_token_s > now:
            record.first_token_s = stream.since

    def _go_on(self, request: str, group: str, first: float) -> None:
        """Let the request generate tokens in that group from `first` on, until it has all."""
        stream, (ranks, full) = self.streams[int(request)], self._shape(group)
        asked = stream.request
        costs = replace(self._costs(asked.model), decode_s=asked.decode_s)
        self._home[request] = group
        stream.since, stream.pace_s = first, sizing.tpot_s(costs, ranks, full)
        self._cancel(stream)
        end = first + (asked.tokens - 1 - stream.done) * stream.pace_s
        stream.timer = self._loop.plan(end, partial(self._ended, request))

    def _cancel(self, stream: _Stream) -> None:
        if stream.timer is not None:
            stream.timer.cancel()

    def _halt(self, request: str) -> float:
        """Stop the request's tokens; return when it can continue at the earliest, not before its first token."""
        stream, now = self.streams[int(request)], self._loop.now
        self._cancel(stream)
        if now >= stream.since:
            made = (now - stream.since) / stream.pace_s if stream.pace_s else inf
            stream.done = min(stream.request.tokens - 1.0, stream.done + made)
        return max(now, stream.since)

    def _move(self, request: str, target: str) -> None:
        self._moved += 1
        moment = self._halt(request)
        self._goal[request] = target
        resume = partial(self._resumed, request, target)
        self.streams[int(request)].timer = self._loop.plan(moment + self.move_s, resume)

    def _resumed(self, request: str, target: str) -> None:
        self._goal.pop(request, None)
        self._go_on(request, target, self._loop.now)
        self._tell(events.Moved(request, True))
