"""Scheduling decisions of the fleet, without I/O.

Invariants after each event: requests are dispatched only to groups whose workers are all ready, in order of arrival per
model. A worker is stopped only if no group uses it. The reservations on a device or a link do not exceed its capacity.
The requests of a lost group return to the queue in their original positions. Events about unknown workers are ignored, so
a restarted fleet may receive an event twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from coldstart.fleet import events
from coldstart.fleet.events import Action, DispatchRequest, Event, RejectRequest, WorkerEvent
from coldstart.fleet.groups import Deployment, GroupWorker, ModelAgenda
from coldstart.fleet.lives import IDLE, RETRY, GroupLifecycle
from coldstart.fleet.roster import Roster
from coldstart.fleet.specification import FleetModel, FleetSettings, ServerSpec

SUSPECT_S = 1.0
NO_SERVERS = frozenset[str]()
MAX_MODELS_PER_EVENT = 8
"""Maximum number of models that one event places, so that its duration does not depend on the number of waiting models."""


class FleetCore:
    """Scheduler that decides which groups of workers a fleet runs.

    Times are in seconds on one monotonic clock. `starts` is the number of groups started so far. A model that fits on no
    server waits until memory becomes free, or until an idle group of another model has been stopped for it.
    """

    def __init__(
        self,
        settings: FleetSettings,
        servers: Iterable[ServerSpec] = (),
        models: Iterable[FleetModel] = (),
        roster: Roster | None = None,
    ) -> None:
        self.settings, self.roster = settings, roster or Roster(settings)
        self.models: dict[str, Deployment] = {}
        self._agenda = ModelAgenda(self.models, settings.hold_s)
        self._lifecycle = GroupLifecycle(settings, self.models, self.roster, self._agenda)
        self.starts = 0
        self._reclaimed: dict[str, str] = {}
        self.groups = self._lifecycle.groups
        for server in servers:
            self.roster.join(server, 0.0)
        for model in models:
            self._deploy_model(model)

    @property
    def waiting_count(self) -> int:
        """Return the number of waiting requests."""
        return len(self._agenda.waiting)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Process an event that occurs at time `now`, and return the actions that the caller must execute."""
        return [
            *self._process_event(event, now),
            *self._process_timers(now),
            *self._advance_models(now),
            *self.roster.list_changed_rates(),
        ]

    def deadline(self) -> float:
        """Return the time by which the core must receive a `Tick`, or infinity if it waits for no timer."""
        return self._agenda.deadline()

    def _process_event(self, event: Event, now: float) -> Iterator[Action]:
        match event:
            case events.RequestArrived(request, name):
                yield from self._admit_request(request, name, now)
            case events.GroupSuspected(name):
                if (group := self.groups.get(name)) is not None:
                    group.suspect_until = now + SUSPECT_S
                    self._agenda.add_timer(group.suspect_until, RETRY, group.model)
            case events.FleetRecovered(servers, ranks, drained):
                for server in servers:
                    self.roster.join(server, now)
                yield from self._lifecycle.rebuild(ranks, drained, now)
            case events.RequestEnded(request):
                if request in self._agenda.open:
                    yield from self._lifecycle.end_request(request, now)
            case events.StreamMoved(request, done):
                yield from self._lifecycle.end_move(request, done, now)
            case events.ServerJoined(server):
                yield from self._lifecycle.lose_server(server.name, now)
                self.roster.join(server, now)
                self._agenda.free()
            case events.ServerLost(server):
                yield from self._lifecycle.lose_server(server, now)
            case events.ServerDrained(server, streams):
                yield from self._lifecycle.drain_server(server, streams, now)
            case events.LinkMeasured(server, bandwidth):
                self.roster.record_bandwidth(server, bandwidth, now)
            case events.HopsMeasured(server, seconds):
                self.roster.time_hops(server, seconds)
            case events.ModelDeployed(model):
                self._deploy_model(model)
            case events.ModelRemoved(name):
                yield from self._remove_model(name, now)
            case events.Tick():
                pass
            case _ if (worker := self.roster.workers.get(event.worker)) is not None:
                yield from self._process_worker_event(event, worker, now)

    def _process_worker_event(self, event: WorkerEvent, worker: GroupWorker, now: float) -> Iterator[Action]:
        match event:
            case events.WeightsFetched():
                self.roster.record_fetched(worker, now)
                self._agenda.free()
            case events.RankReady():
                self.roster.record_loaded(worker, now)
                if (group := self.groups.get(worker.launch.group)) is not None:
                    yield from self._lifecycle.begin_serving(group, now)
            case events.WorkerEnded(_, reason, own):
                yield from self._lifecycle.end_worker(worker, reason, now, own=own)

    def _admit_request(self, request: str, name: str, now: float) -> Iterator[Action]:
        model = self.models.get(name)
        if request in self._agenda.open:
            return
        if model is None or model.retired:
            yield RejectRequest(request, 404, f"model {name} is not deployed")
        elif self.waiting_count >= self.settings.max_held:
            yield RejectRequest(request, 429, f"the queue is full ({self.waiting_count} waiting)", 1.0)
        else:
            model.arrivals.append(now)
            self._agenda.enqueue_request(request, name, now)
            self._agenda.touch(name)

    def _process_timers(self, now: float) -> Iterator[Action]:
        yield from self._agenda.reject_expired(now)
        for kind, name in self._agenda.pop_due_timers(now):
            if kind == IDLE and name in self.groups:
                yield from self._lifecycle.stop_idle(self.groups[name], now)
            elif kind == RETRY:
                self._agenda.touch(name)

    def _deploy_model(self, spec: FleetModel) -> None:
        known = self.models.get(spec.name)
        if known is None:
            self.models[spec.name] = Deployment(spec, self.settings.window_s)
        else:
            known.spec, known.retired = spec, False
        self._agenda.touch(spec.name)

    def _remove_model(self, name: str, now: float) -> Iterator[Action]:
        model = self.models.get(name)
        if model is None:
            return
        model.retired = True
        # The next deployment starts at once, on any server and with any number of ranks.
        model.failures, model.retry_at = 0, 0.0
        model.avoided_until.clear()
        model.failed_ranks.clear()
        self._agenda.unblock(name)
        for request in list(model.waiting):
            self._agenda.remove_request(request)
            yield RejectRequest(request, 404, f"model {name} is not deployed")
        for group in list(model.groups.values()):
            yield from self._lifecycle.stop(group, now)

    def _advance_models(self, now: float) -> Iterator[Action]:
        """Start workers for at most MAX_MODELS_PER_EVENT models. The next event processes the other models."""
        left = MAX_MODELS_PER_EVENT
        while left > 0 and (names := self._agenda.take(left)):
            left -= len(names)
            room = self.roster.find_most_free() if len(names) > 1 else None
            for name in names:
                if name in self.models:
                    yield from self._send_waiting(self.models[name], now)
                    yield from self._lifecycle.move_drained_streams(self.models[name], now)
                    yield from self._start_group(self.models[name], room, now)

    def _send_waiting(self, model: Deployment, now: float) -> Iterator[Action]:
        while (found := model.find_next_dispatch(now)) is not None:
            request, group = found
            self._agenda.assign_request(request, group.name)
            self._lifecycle.assign(request, group)
            yield DispatchRequest(request, group.name)

    def _start_group(self, model: Deployment, room: int | None, now: float) -> Iterator[Action]:
        spec, name = model.spec, model.spec.name
        while need := model.count_workers_to_start(now):
            # Keeping one more worker of a starting pipeline is faster than starting a new group.
            if self.settings.consolidate and any(
                self._lifecycle.keeps_more(one, spec) for one in model.groups.values()
            ):
                continue
            waited_s = now - next(iter(model.waiting.values()), now)
            fits = room is None or spec.part(self.settings.most_ranks) <= room
            scheme = None
            # A server on which a start failed is tried again only if no other server has memory or can free
            # some. A pipeline size that failed is tried again only if nothing else fits.
            startable, failed = model.get_startable_spec(now), model.list_avoided_servers(now)
            tries = [(startable, failed)]
            tries += [(startable, NO_SERVERS)] if failed else []
            tries += [(spec, NO_SERVERS)] if startable is not spec else []
            for one, avoided in tries:
                if fits:
                    scheme = self.roster.place(one, need, now, waited_s, avoided)
                if scheme is None:
                    yield from self._stop_idle_group_for(model, now, avoided)
                if scheme is not None or self._is_group_leaving_for(name):
                    break
            if scheme is None:
                self._agenda.block(name)
                return
            self.starts += 1
            group, orders = self.roster.launch(model, scheme, need, now)
            self._lifecycle.add(group)
            yield from orders
        self._agenda.unblock(name)
        self._reclaimed.pop(name, None)

    def _stop_idle_group_for(
        self, model: Deployment, now: float, avoided: Collection[str]
    ) -> Iterator[Action]:
        """Stop the longest-idle group whose device would then fit the model, but only one group at a time per model."""
        name, memory = model.spec.name, model.spec.memory
        if not self.settings.reclaim or self._is_group_leaving_for(name):
            return
        for group in self._lifecycle.idle.values():
            if not group.idle:
                continue
            worker = group.workers[0]
            if worker.server in avoided:
                continue
            free = self.roster.servers[worker.server].free[worker.launch.device]
            if free + worker.memory >= memory and self.models[group.model].has_minimum_without(group):
                self._reclaimed[name] = worker.name
                yield from self._lifecycle.stop(group, now)
                return

    def _is_group_leaving_for(self, name: str) -> bool:
        return self._reclaimed.get(name, "") in self.roster.workers
