"""Fleet simulator: replays a trace on the controller's own core, with simulated links and time instead of processes.

Model: a link divides its bandwidth equally among foreground fetches, then background fetches (`network_link`); fetching
and loading overlap as `sizing` predicts. A request on s ranks, w of them with full weights, is slowed by equation 2 and
does not slow other requests. A migrated stream pauses for `move_s`, then runs at the speed of its new group. Workers
stop at once. They die, and messages are lost, only if `faults` contains such events. Times are in seconds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from coldstart.fleet import events, sizing
from coldstart.fleet.core import FleetCore
from coldstart.fleet.events import Action, Event
from coldstart.fleet.reservations import NetworkLink
from coldstart.fleet.roster import Roster
from coldstart.fleet.specification import Costs, FleetModel, FleetSettings, ServerSpec
from coldstart.lab.loop import Call, EventLoop, Timer
from coldstart.lab.records import Replay, RequestRecord, SimulatedRequest


@dataclass(slots=True)
class _Stream:
    """Request in its current group: the tokens decoded before `first_token_s`, and the seconds per token after that."""

    request: SimulatedRequest
    record: RequestRecord
    tokens_done: float = 0.0
    first_token_s: float = 0.0
    tpot_s: float = 0.0
    timer: Timer = field(default_factory=Timer)


@dataclass(slots=True)
class _Process:
    launch: events.LaunchRank
    started_s: float
    is_stopping: bool = False


def simulate(
    requests: Iterable[SimulatedRequest],
    servers: Sequence[ServerSpec],
    models: Iterable[FleetModel],
    settings: FleetSettings,
    *,
    move_s: float = 0.34,
    faults: Sequence[tuple[float, Event]] = (),
    roster: Roster | None = None,
    core: Callable[..., FleetCore] = FleetCore,
) -> Replay:
    """Replay requests, which must be in order of arrival. `core` is FleetCore or a subclass of it.

    The SLO comes from the models. The count `fetched_bytes` includes background fetches.
    """
    fleet = _Fleet(core(settings, servers, models, roster), servers, move_s)
    return fleet.replay(requests, faults)


class _Fleet:
    def __init__(self, core: FleetCore, servers: Sequence[ServerSpec], move_s: float) -> None:
        self.core, self.move_s = core, move_s
        self.streams: list[_Stream] = []
        self._worker_count = self._moved_streams = 0
        self._groups_by_ranks = Counter[int]()
        self.servers = {server.name: server for server in servers}
        self.links = {server.name: NetworkLink(server.network) for server in servers}
        self.processes: dict[str, _Process] = {}
        self.group_ranks = defaultdict[str, tuple[int, int]](lambda: (1, 1))
        self._loop = EventLoop(core.deadline, lambda: self._handle_event(events.Tick()))
        self._link_timers: dict[str, Timer] = {}
        self._open_requests = 0
        self._group_of_request: dict[str, str] = {}
        self._move_target: dict[str, str] = {}

    def replay(self, requests: Iterable[SimulatedRequest], faults: Sequence[tuple[float, Event]]) -> Replay:
        for time, event in faults:
            self._loop.call_at(time, partial(self._inject_fault, event))
        arrivals = ((request.arrival_s, partial(self._on_arrival, request)) for request in requests)
        self._loop.run(arrivals, is_open=lambda: self._open_requests > 0)
        records = [stream.record for stream in self.streams]
        counts = {
            "servers": len(self.servers),
            "starts": self.core.starts,
            "workers": self._worker_count,
            "groups_by_ranks": {str(ranks): count for ranks, count in sorted(self._groups_by_ranks.items())},
            "streams_moved": self._moved_streams,
            "fetched_bytes": sum(link.moved for link in self.links.values()),
        }
        limits: dict[str | None, dict[str, float]] = {}
        for name, model in self.core.models.items():
            both = {"ttft_s": model.spec.ttft_s, "tpot_s": model.spec.tpot_s}
            limits[name] = {metric: limit for metric, limit in both.items() if limit < inf}
        end = max((one.finished_s or 0.0 for one in records), default=0.0)
        return Replay(records, end, counts=counts, limits=limits)

    def _on_arrival(self, request: SimulatedRequest) -> None:
        record = request.create_record(len(self.streams))
        self.streams.append(_Stream(request, record))
        self._open_requests += 1
        self._handle_event(events.RequestArrived(str(record.number), request.model))
        record.cold = record.sent_s is None

    def _on_request_end(self, request: str) -> None:
        stream = self.streams[int(request)]
        stream.record.finished_s, stream.record.output_tokens = self._loop.now, stream.request.tokens
        self._group_of_request.pop(request, None)
        self._open_requests -= 1
        self._handle_event(events.RequestEnded(request))

    def _on_worker_stop(self, worker: str) -> None:
        if self.processes.pop(worker, None) is not None:
            self._handle_event(events.WorkerEnded(worker))

    def _call_if_running(self, worker: str, call: Call) -> None:
        if self._is_running(worker):
            call()

    def _is_running(self, worker: str) -> bool:
        return worker in self.processes and not self.processes[worker].is_stopping

    def _inject_fault(self, event: Event) -> None:
        match event:
            case events.WorkerEnded(worker):
                if worker in self.processes:
                    self._kill_worker(worker)
            case events.ServerLost(server):
                for worker in [w for w, p in self.processes.items() if p.launch.server == server]:
                    self._kill_worker(worker)
        self._handle_event(event)

    def _kill_worker(self, worker: str) -> None:
        process = self.processes.pop(worker)
        self._release(process)
        dead = process.launch.group
        for request, home in list(self._group_of_request.items()):
            if home == dead:
                self._pause(request)
            elif self._move_target.get(request) == dead:
                del self._move_target[request]
                self._generate(request, home, self._loop.now + self.move_s)

    def _handle_event(self, event: Event) -> None:
        for action in self.core.handle(event, self._loop.now):
            self._execute(action)

    def _execute(self, action: Action) -> None:
        now = self._loop.now
        match action:
            case events.LaunchRank():
                self._launch(action)
            case events.StopWorker(worker):
                process = self.processes[worker]
                process.is_stopping = True
                self._release(process)
                self._loop.call_at(now, partial(self._on_worker_stop, worker))
            case events.DispatchRequest(request, group):
                self._dispatch(request, group)
            case events.MoveStream(request, _, target):
                self._move(request, target)
            case events.RejectRequest(request, status, reason):
                stream = self.streams[int(request)]
                self._open_requests -= 1
                stream.record.error = f"HTTP {status}: {reason}"
                stream.timer.cancel()
                self._group_of_request.pop(request, None)

    def _launch(self, launch: events.LaunchRank) -> None:
        now = self._loop.now
        self.processes[launch.worker] = _Process(launch, now)
        self.group_ranks[launch.group] = launch.ranks, launch.full
        if launch.beside:
            self._fetch(launch.worker, launch.server, launch.fetch, background=True)
            return
        self._worker_count += 1
        self._groups_by_ranks[launch.ranks] += launch.rank == 0
        fetch = partial(self._fetch, launch.worker, launch.server, launch.fetch)
        begin = sizing.predict_fetch_begin_s(self._get_costs(launch.model)) if launch.fetch else 0.0
        if begin:
            self._loop.call_at(now + begin, partial(self._call_if_running, launch.worker, fetch))
        else:
            fetch()

    def _get_costs(self, model: str) -> Costs:
        return self.core.models[model].spec.costs

    def _fetch(self, name: str, server: str, size: int, *, background: bool = False) -> None:
        if not size:
            self._loop.call_at(self._loop.now, partial(self._on_fetch_end, name))
            return
        self._advance_link(server)
        self.links[server].add(name, size, background=background)
        self._set_link_timer(server)

    def _release(self, process: _Process) -> None:
        server = process.launch.server
        self._advance_link(server)
        self.links[server].drop(process.launch.worker)
        self._set_link_timer(server)

    def _advance_link(self, server: str) -> None:
        """Transfer bytes until now. Completed fetches are handled as later events, not during the current actions."""
        for name, time in self.links[server].advance(self._loop.now):
            self._loop.call_at(time, partial(self._on_fetch_end, name))
        self._set_link_timer(server)

    def _set_link_timer(self, server: str) -> None:
        if server in self._link_timers:
            self._link_timers.pop(server).cancel()
        if (end := self.links[server].next_end()) < inf:
            self._link_timers[server] = self._loop.call_at(end, partial(self._advance_link, server))

    def _on_fetch_end(self, worker: str) -> None:
        now = self._loop.now
        if not self._is_running(worker):
            return
        process = self.processes[worker]
        launch, load = process.launch, self.servers[process.launch.server].load
        ready = partial(self._call_if_running, worker, partial(self._handle_event, events.RankReady(worker)))
        if launch.beside:
            rest = launch.size - self.processes[launch.beside].launch.size
            self._loop.call_at(now + sizing.fetch_s(rest, load), ready)
            return
        costs = self._get_costs(launch.model)
        # Weights in host memory are available at once, but the runtime is not.
        begin = sizing.predict_fetch_begin_s(costs) if not launch.fetch else 0.0
        after = sizing.predict_loaded_after_s(costs, launch.size, load, max(begin, now - process.started_s))
        after += costs.join_s * launch.ranks
        self._loop.call_at(process.started_s + after, ready)
        if launch.fetch:
            self._handle_event(events.WeightsFetched(worker))

    def _dispatch(self, request: str, group: str) -> None:
        stream, (ranks, full), now = self.streams[int(request)], self.group_ranks[group], self._loop.now
        asked, record = stream.request, stream.record
        own = replace(
            self._get_costs(asked.model), prefill_s=asked.prefill_s, decode_s=asked.seconds_per_token
        )
        if record.sent_s is None:
            record.sent_s = now
        self._generate(request, group, now + sizing.predict_first_token_s(own, ranks, full))
        if record.first_token_s is None or record.first_token_s > now:
            record.first_token_s = stream.first_token_s

    def _generate(self, request: str, group: str, first: float) -> None:
        """Schedule the end of a request that generates its remaining tokens in `group` from time `first` on."""
        stream, (ranks, full) = self.streams[int(request)], self.group_ranks[group]
        asked = stream.request
        costs = replace(self._get_costs(asked.model), decode_s=asked.seconds_per_token)
        self._group_of_request[request] = group
        stream.first_token_s, stream.tpot_s = first, sizing.predict_tpot_s(costs, ranks, full)
        stream.timer.cancel()
        end = first + (asked.tokens - 1 - stream.tokens_done) * stream.tpot_s
        stream.timer = self._loop.call_at(end, partial(self._on_request_end, request))

    def _pause(self, request: str) -> float:
        """Pause generation, and return the earliest time at which it can continue, which is not before the first token."""
        stream, now = self.streams[int(request)], self._loop.now
        stream.timer.cancel()
        if now >= stream.first_token_s:
            generated = (now - stream.first_token_s) / stream.tpot_s if stream.tpot_s else inf
            stream.tokens_done = min(stream.request.tokens - 1.0, stream.tokens_done + generated)
        return max(now, stream.first_token_s)

    def _move(self, request: str, target: str) -> None:
        self._moved_streams += 1
        resume_s = self._pause(request)
        self._move_target[request] = target
        resume = partial(self._on_move_end, request, target)
        self.streams[int(request)].timer = self._loop.call_at(resume_s + self.move_s, resume)

    def _on_move_end(self, request: str, target: str) -> None:
        self._move_target.pop(request, None)
        self._generate(request, target, self._loop.now)
        self._handle_event(events.StreamMoved(request, True))
