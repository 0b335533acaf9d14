"""Decisions of the fleet, without I/O: `handle(event, now)` returns the actions that follow.

Invariants, after each event: a request goes only to a group whose workers are all ready, in order of arrival by
model; a worker is stopped only while no group uses it; reservations on a device or a link never exceed its capacity;
the requests of a group that died are back in the queue in their old positions. Events of unknown workers are ignored,
so a restarted fleet may receive events twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from coldstart.fleet import events
from coldstart.fleet.events import Action, DispatchRequest, Event, RejectRequest
from coldstart.fleet.groups import HOLD, Agenda, Deployment, FleetWorker
from coldstart.fleet.lives import IDLE, RETRY, GroupLives
from coldstart.fleet.roster import Roster
from coldstart.fleet.specification import FleetModel, FleetSettings, ServerSpec

SUSPECT_S = 1.0
NONE = frozenset[str]()
AT_ONCE = 16
"""Models that one decision places: so its time does not depend on how many models wait for memory."""


class FleetCore:
    """Decisions of one fleet. `now` is in seconds on one monotonic clock; `starts` counts launched groups.

    A model that fits on no server waits until memory becomes free, or until an idle group of another model has stopped.
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
        self._agenda = Agenda(self.models, settings.hold_s)
        self._lives = GroupLives(settings, self.models, self.roster, self._agenda)
        self.starts = 0
        self._reclaimed: dict[str, str] = {}
        self.groups = self._lives.groups
        for server in servers:
            self.roster.join(server, 0.0)
        for model in models:
            self._deployed(model)

    @property
    def waiting_count(self) -> int:
        """Return the number of waiting requests."""
        return self._agenda.held

    def handle(self, event: Event, now: float) -> list[Action]:
        """Process an event and return the actions to carry out."""
        return [*self._note(event, now), *self._timed(now), *self._advance(now), *self.roster.shares()]

    def deadline(self) -> float:
        """Return when `Tick` is due at the latest; infinity if nothing depends on time."""
        return self._agenda.deadline()

    def _note(self, event: Event, now: float) -> Iterator[Action]:
        match event:
            case events.RequestArrived(request, name):
                yield from self._arrived(request, name, now)
            case events.Suspected(name):
                if (group := self.groups.get(name)) is not None:
                    group.suspect_until = now + SUSPECT_S
                    self._agenda.plan(group.suspect_until, RETRY, group.model)
            case events.Rebuilt(servers, ranks, drained):
                for server in servers:
                    self.roster.join(server, now)
                    if server.name in drained:
                        self.roster.drain(server.name)
                yield from self._lives.rebuild(ranks, now)
            case events.RequestEnded(request):
                if request in self._agenda.open:
                    yield from self._lives.end_request(request, now)
            case events.Moved(request, done):
                yield from self._lives.end_move(request, done, now)
            case events.Joined(server):
                yield from self._lives.lose_server(server.name, now)
                self.roster.join(server, now)
                self._agenda.free()
            case events.ServerLost(server):
                yield from self._lives.lose_server(server, now)
            case events.Drained(server):
                yield from self._lives.drain_server(server, now)
            case events.Rate(server, bandwidth):
                self.roster.measured(server, bandwidth, now)
            case events.HopsTimed(server, seconds):
                self.roster.time_hops(server, seconds)
            case events.Deployed(model):
                self._deployed(model)
            case events.Removed(name):
                yield from self._removed(name, now)
            case events.Tick():
                pass
            case _ if (worker := self.roster.workers.get(event.worker)) is not None:
                yield from self._of_worker(event, worker, now)

    def _of_worker(
        self,
        event: events.Fetched | events.RankReady | events.WorkerDied | events.Stopped,
        worker: FleetWorker,
        now: float,
    ) -> Iterator[Action]:
        match event:
            case events.Fetched():
                self.roster.fetched(worker, now)
                self._agenda.free()
            case events.RankReady():
                self.roster.ready(worker, now)
                if (group := self.groups.get(worker.launch.group)) is not None:
                    yield from self._lives.begin_serving(group, now)
            case events.WorkerDied(_, reason, own):
                yield from self._lives.end_worker(worker, reason, now, own=own)
            case events.Stopped():
                self.roster.remove_worker(worker, now)
                self._agenda.free()

    def _arrived(self, request: str, name: str, now: float) -> Iterator[Action]:
        model = self.models.get(name)
        if request in self._agenda.open:
            return
        if model is None or model.retired:
            yield RejectRequest(request, 404, f"model {name} is not deployed")
        elif self.waiting_count >= self.settings.max_held:
            yield RejectRequest(request, 429, f"{self.waiting_count} requests already wait", 1.0)
        else:
            model.arrivals.append(now)
            self._agenda.wait(request, name, now)

    def _timed(self, now: float) -> Iterator[Action]:
        for kind, name in self._agenda.due(now):
            if kind == HOLD and self._agenda.waits(name):
                waited = now - self._agenda.forget(name).since
                yield RejectRequest(name, 504, f"its model did not become ready in {waited:.0f} s")
            elif kind == IDLE and name in self.groups:
                yield from self._lives.stop_idle(self.groups[name], now)
            elif kind == RETRY:
                self._agenda.touch(name)

    def _deployed(self, spec: FleetModel) -> None:
        known = self.models.get(spec.name)
        if known is None:
            self.models[spec.name] = Deployment(spec, self.settings.window_s)
        else:
            known.spec, known.retired = spec, False
        self._agenda.touch(spec.name)

    def _removed(self, name: str, now: float) -> Iterator[Action]:
        model = self.models.get(name)
        if model is None:
            return
        model.retired = True
        model.failed_on.clear()
        self._agenda.unblock(name)
        for request in list(model.waiting):
            self._agenda.forget(request)
            yield RejectRequest(request, 404, f"model {name} is not deployed")
        for group in list(model.groups.values()):
            yield from self._lives.stop(group, now)

    def _advance(self, now: float) -> Iterator[Action]:
        """Process the models that have changed: at most AT_ONCE, and the others with the next event, which is due at once."""
        left = AT_ONCE
        while left > 0 and (names := self._agenda.take(left)):
            left -= len(names)
            room = self.roster.find_most_free() if len(names) > 1 else None
            for name in names:
                if name in self.models:
                    yield from self._send_waiting(self.models[name], now)
                    yield from self._grow(self.models[name], room, now)

    def _send_waiting(self, model: Deployment, now: float) -> Iterator[Action]:
        while (found := model.next_to_send(now)) is not None:
            request, group = found
            self._agenda.send(request, group.name)
            self._lives.assign(request, group)
            yield DispatchRequest(request, group.name)

    def _grow(self, model: Deployment, room: int | None, now: float) -> Iterator[Action]:
        spec, name = model.spec, model.spec.name
        while need := model.wanted(now):
            # One more worker of a starting pipeline serves sooner than a new start.
            if self.settings.consolidate and any(
                self._lives.keeps_more(one, spec) for one in model.groups.values()
            ):
                continue
            waited_s = now - next(iter(model.waiting.values()), now)
            fits = room is None or spec.part(self.settings.most_ranks) <= room
            scheme = None
            # A server where a start failed is tried again only if no other server has memory, or can free
            # some; a pipeline that failed only if nothing else fits.
            startable, failed_on = model.startable(now), model.avoided(now)
            tries = [(startable, failed_on)]
            tries += [(startable, NONE)] if failed_on else []
            tries += [(spec, NONE)] if startable is not spec else []
            for one, avoided in tries:
                if fits:
                    scheme = self.roster.place(one, need, now, waited_s, avoided)
                if scheme is None:
                    yield from self._reclaim(model, now, avoided)
                if scheme is not None or self._leaving_for(name):
                    break
            if scheme is None:
                self._agenda.block(name)
                return
            self.starts += 1
            group, orders = self.roster.launch(model, scheme, need, now)
            self._lives.add(group)
            yield from orders
        self._agenda.unblock(name)
        self._reclaimed.pop(name, None)

    def _reclaim(self, model: Deployment, now: float, avoided: Collection[str]) -> Iterator[Action]:
        """Stop the longest idle group whose device then fits the model; at most one at a time per model."""
        name, memory = model.spec.name, model.spec.memory
        if not self.settings.reclaim or self._leaving_for(name):
            return
        for group in self._lives.idle.values():
            if not group.idle:
                continue
            worker = group.workers[0]
            if worker.server in avoided:
                continue
            free = self.roster.servers[worker.server].free[worker.launch.device]
            if free + worker.memory >= memory and self.models[group.model].spares(group):
                self._reclaimed[name] = worker.name
                yield from self._lives.stop(group, now)
                return

    def _leaving_for(self, name: str) -> bool:
        return self._reclaimed.get(name, "") in self.roster.workers
