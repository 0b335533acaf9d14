"""Every decision of the fleet, without I/O: `on(event, now)` gives the actions that follow.

Invariants, after each event: a request goes only to a group all of whose workers are ready, in order of arrival by model;
a worker is told to stop only when nobody uses it; what is promised on a device or a link never exceeds it; a model whose
group died has its requests back in the queue, at their old places. Events of workers that are no more mean nothing, so a
controller that starts again may be told everything twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from coldstart.fleet import events
from coldstart.fleet.consolidation import Consolidation
from coldstart.fleet.deployments import Deployment
from coldstart.fleet.events import Action, Event, Refuse, Send
from coldstart.fleet.groups import WHOLE, FleetWorker, Group, GroupPhase
from coldstart.fleet.placement import place
from coldstart.fleet.roster import Roster
from coldstart.fleet.specification import FleetModel, FleetSettings, ServerSpec
from coldstart.fleet.timers import Timers
from coldstart.fleet.window import Window

HOLD, IDLE, RETRY = "hold", "idle", "retry"


class FleetCore:
    """`now` is in seconds on one clock that never goes back. `starts` counts groups, `moves` streams handed over."""

    def __init__(
        self,
        settings: FleetSettings,
        servers: Iterable[ServerSpec] = (),
        models: Iterable[FleetModel] = (),
    ) -> None:
        self.settings, self.roster, self.timers = settings, Roster(settings), Timers()
        self.models: dict[str, Deployment] = {}
        self.groups: dict[str, Group] = {}
        self.starts = self.moves = self.held = 0
        self._requests: dict[str, tuple[str, float, str | None]] = {}
        self._tries: dict[str, int] = {}
        self._blocked: dict[str, None] = {}
        self._idle: dict[str, None] = {}
        self._reclaimed: dict[str, str] = {}
        self._touched: dict[str, None] = {}
        self._freed = False
        self._consolidation = Consolidation(self.roster)
        for server in servers:
            self.roster.cluster.join(server, 0.0)
        for model in models:
            self._deployed(model)

    def on(self, event: Event, now: float) -> list[Action]:
        """Take note, then order what can be done now."""
        return [*self._note(event, now), *self._timed(now), *self._advance(now)]

    def deadline(self) -> float:
        """When `Tick` is due at the latest; infinity where nothing waits for time to pass."""
        return self.timers.next()

    # What happened.

    def _note(self, event: Event, now: float) -> Iterator[Action]:
        match event:
            case events.Arrived(request, name):
                yield from self._arrived(request, name, now)
            case events.Routed(request, name, group):
                self._routed(request, name, group, now)
            case events.Rebuilt(servers, ranks, drained):
                for server in servers:
                    self.roster.cluster.join(server, now)
                    self.roster.cluster.servers[server.name].draining = server.name in drained
                yield from self._rebuilt(ranks, now)
            case events.Ended(request):
                yield from self._ended(request, now)
            case events.Moved(request, done):
                yield from self._moved(request, done, now)
            case events.Joined(server):
                yield from self._lost(server.name, now)
                self.roster.cluster.join(server, now)
                self._freed = True
            case events.ServerLost(server):
                yield from self._lost(server, now)
            case events.Drained(server):
                yield from self._drained(server, now)
            case events.Rate(server, bandwidth):
                if server in self.roster.cluster.servers:
                    self.roster.cluster.servers[server].ledger.measured(bandwidth, now)
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
        event: events.Fetched
        | events.RankReady
        | events.Whole
        | events.WorkerDied
        | events.ProcessDied
        | events.Released
        | events.Stopped,
        worker: FleetWorker,
        now: float,
    ) -> Iterator[Action]:
        model = self.models[worker.model]
        match event:
            case events.Fetched():
                self.roster.fetched(worker, model.spec, now)
                self._freed = True
            case events.RankReady():
                worker.ready = True
                for name in list(worker.groups):
                    yield from self._up(self.groups[name], now)
            case events.Whole():
                self.roster.whole(worker, model.spec, now)
                self._freed = True
                yield from self._whole(worker, now)
            case events.WorkerDied(_, reason):
                yield from self._died(worker, reason, now)
            case events.ProcessDied(_, name, reason):
                if name in worker.groups:
                    yield from self._failed(self.groups[name], f"{worker.name}: {reason}", now)
            case events.Released(_, name):
                self.roster.released(worker, model.spec, name)
                self._freed = True
            case events.Stopped():
                self.roster.gone(worker, now)
                self._freed = True

    def _arrived(self, request: str, name: str, now: float) -> Iterator[Action]:
        model = self.models.get(name)
        if request in self._requests:
            return
        if model is None or model.retired:
            yield Refuse(request, 404, f"model {name} is not deployed")
        elif self.held >= self.settings.max_held:
            yield Refuse(request, 429, f"{self.held} requests wait already", 1.0)
        else:
            model.window.arrived(now)
            self._wait(request, model, now, now)

    def _routed(self, request: str, name: str, group: str, now: float) -> None:
        """Count it where it is; one whose group is gone is its gateway's affair."""
        if request in self._requests or group not in self.groups or self.groups[group].model != name:
            return
        self.models[name].window.arrived(now)
        self._requests[request] = name, now, group
        self.groups[group].in_flight[request] = None
        self._idle.pop(group, None)

    def _wait(
        self, request: str, model: Deployment, since: float, now: float, *, again: bool = False
    ) -> None:
        self._requests[request] = model.spec.name, since, None
        self.held += 1
        self.timers.add(now + self.settings.hold_s, HOLD, request)
        if again:
            model.back(request, since)
        else:
            model.waiting[request] = since
        self._touched[model.spec.name] = None

    def _forget(self, request: str) -> None:
        name, _, group = self._requests.pop(request)
        self._tries.pop(request, None)
        if group is None:
            self.held -= 1
            self.models[name].waiting.pop(request, None)

    def _ended(self, request: str, now: float) -> Iterator[Action]:
        if request not in self._requests:
            return
        name, _, at = self._requests[request]
        self._forget(request)
        self._touched[name] = None
        moving = self._consolidation.moving.pop(request, None)
        for group in (at, moving):
            if group in self.groups:
                yield from self._left(self.groups[group], request, now)

    def _left(self, group: Group, request: str, now: float) -> Iterator[Action]:
        """The group no longer has that request."""
        group.in_flight.pop(request, None)
        self._touched[group.model] = None
        if group.in_flight:
            return
        group.since = now
        if group.phase is GroupPhase.LEAVING:
            yield from self._close(group, now)
        else:
            self._rest(group, now)

    def _rest(self, group: Group, now: float) -> None:
        # A worker that has streams in its pipeline still does not idle.
        if group.idle and not (group.single and len(group.workers[0].groups) > 1):
            self._idle.pop(group.name, None)
            self._idle[group.name] = None
            self.timers.add(now + self.models[group.model].spec.idle_s, IDLE, group.name)

    def _close(self, group: Group, now: float) -> Iterator[Action]:
        """Nobody uses it: its workers stop, but those that serve on by themselves."""
        self.groups.pop(group.name, None)
        self.models[group.model].groups.pop(group.name, None)
        self._idle.pop(group.name, None)
        self._freed = True
        yield from self.roster.stop(group, now)
        for worker in group.workers:
            if not worker.groups or worker.name not in self.roster.workers:
                continue
            if self.settings.beside:
                yield events.Release(worker.name, group.name)
            for name in worker.groups:
                self._rest(self.groups[name], now)

    # A group's life.

    def _up(self, group: Group, now: float) -> Iterator[Action]:
        if group.phase is not GroupPhase.STARTING or not group.ready:
            return
        model = self.models[group.model]
        model.failures, group.phase, group.since = 0, GroupPhase.SERVING, now
        self._touched[group.model] = None
        self._rest(group, now)
        beside = any(worker.name + WHOLE in self.roster.workers for worker in group.workers)
        if self.settings.consolidate and len(group.workers) > 1 and not beside:
            yield from self._consolidation.begin(group, model.wanted(now), model.spec.batch, now)

    def _whole(self, worker: FleetWorker, now: float) -> Iterator[Action]:
        for name in list(worker.groups):
            group = self.groups[name]
            if group.phase is not GroupPhase.SERVING or not self._consolidation.complete(group):
                continue
            self._idle.pop(group.name, None)
            for single in self._consolidation.split(group, self.models[group.model].spec.batch, now):
                self.groups[single.name] = self.models[group.model].groups[single.name] = single
            for move in self._consolidation.moves(group, self.groups):
                self.moves += 1
                yield move
            for remaining in group.remaining():
                self._rest(self.groups[remaining.groups[-1]], now)
            if not group.in_flight:
                yield from self._close(group, now)
            self._touched[group.model] = None

    def _moved(self, request: str, done: bool, now: float) -> Iterator[Action]:
        target = self._consolidation.moving.pop(request, None)
        if target is None or request not in self._requests:
            return
        name, since, source = self._requests[request]
        left = source if done else target
        if done:
            self._requests[request] = name, since, target
        if left in self.groups:
            yield from self._left(self.groups[left], request, now)

    def _died(self, worker: FleetWorker, reason: str, now: float) -> Iterator[Action]:
        names = list(worker.groups)
        self.roster.gone(worker, now)
        self._freed = True
        if worker.stopping:
            return
        for name in names:
            yield from self._failed(self.groups[name], f"{worker.name}: {reason}", now)

    def _failed(self, group: Group, reason: str, now: float) -> Iterator[Action]:
        """Any rank's end is the group's: what it had in flight waits again, at its old place."""
        model, starting = self.models[group.model], group.phase is GroupPhase.STARTING
        requests = list(group.in_flight)
        group.in_flight.clear()
        yield from self._close(group, now)
        for request in requests:
            yield from self._again(request, group, reason, now)
        if starting:
            model.failed(reason, now, self.settings)
            self.timers.add(model.retry_at, RETRY, model.spec.name)
            if model.failures > self.settings.retries:
                for request in list(model.waiting):
                    self._forget(request)
                    yield Refuse(request, 503, f"model {group.model} did not start: {reason}", 1.0)
        self._touched[group.model] = None

    def _again(self, request: str, group: Group, reason: str, now: float) -> Iterator[Action]:
        name, since, at = self._requests[request]
        target = self._consolidation.moving.pop(request, None)
        if at != group.name:
            # It was only on its way here: the group it is in has it still.
            return
        if target in self.groups:
            yield from self._left(self.groups[target], request, now)
        self._tries[request] = self._tries.get(request, 0) + 1
        if self._tries[request] > self.settings.retries or self.models[name].retired:
            self._forget(request)
            yield Refuse(request, 503, f"model {name} was lost {self._tries.get(request, 1)} times: {reason}")
            return
        self._wait(request, self.models[name], since, now, again=True)

    # Servers and models.

    def _rebuilt(self, ranks: tuple[events.FoundRank, ...], now: float) -> Iterator[Action]:
        """Groups as they are; what belongs to no model, or to a group that is no longer whole, stops."""
        by_group: dict[str, list[events.FoundRank]] = {}
        for found in ranks:
            by_group.setdefault(found.launch.group, []).append(found)
        # Engines beside ranks first: their pipelines are not consolidated a second time.
        for name, parts in sorted(by_group.items(), key=lambda one: not one[0].endswith(WHOLE)):
            model = self.models.get(parts[0].launch.model)
            group = (
                None if model is None or name in self.groups else self.roster.adopt(parts, model.spec, now)
            )
            if model is None or group is None:
                yield from (events.Stop(part.launch.worker) for part in parts if not part.stopping)
                continue
            self.groups[name] = model.groups[name] = group
            model.number = max(model.number, int(name.rpartition("#")[2].partition(".")[0]))
            yield from self._up(group, now)
        for group in list(self.groups.values()):
            singles = (self.groups.get(worker.name + WHOLE) for worker in group.workers)
            if any(single is not None and single.phase is GroupPhase.SERVING for single in singles):
                yield from self._leave(group, now)
        for model in self.models.values():
            self._touched[model.spec.name] = None

    def _lost(self, server: str, now: float) -> Iterator[Action]:
        if server not in self.roster.cluster.servers:
            return
        for worker in self.roster.lose(server):
            for name in list(worker.groups):
                if name in self.groups:
                    yield from self._failed(self.groups[name], f"server {server} is gone", now)
        self._freed = True

    def _drained(self, server: str, now: float) -> Iterator[Action]:
        if server not in self.roster.cluster.servers:
            return
        self.roster.cluster.servers[server].draining = True
        for group in list(self.groups.values()):
            if any(worker.server == server for worker in group.workers) and group.phase is GroupPhase.SERVING:
                yield from self._leave(group, now)

    def _leave(self, group: Group, now: float) -> Iterator[Action]:
        """It takes nothing new, and goes when it has nothing left."""
        group.phase = GroupPhase.LEAVING
        self._idle.pop(group.name, None)
        if not group.in_flight:
            yield from self._close(group, now)

    def _deployed(self, spec: FleetModel) -> None:
        known = self.models.get(spec.name)
        if known is None:
            self.models[spec.name] = Deployment(spec, Window(self.settings.window_s))
        else:
            known.spec, known.retired = spec, False
        self._touched[spec.name] = None

    def _removed(self, name: str, now: float) -> Iterator[Action]:
        model = self.models.get(name)
        if model is None:
            return
        model.retired = True
        self._blocked.pop(name, None)
        for request in list(model.waiting):
            self._forget(request)
            yield Refuse(request, 404, f"model {name} is not deployed")
        for group in list(model.groups.values()):
            yield from self._leave(group, now)

    # What follows.

    def _timed(self, now: float) -> Iterator[Action]:
        for kind, name in self.timers.due(now):
            if kind == HOLD and name in self._requests and self._requests[name][2] is None:
                waited = now - self._requests[name][1]
                self._forget(name)
                yield Refuse(name, 504, f"its model did not become ready in {waited:.0f} s")
            elif kind == IDLE and name in self.groups:
                yield from self._tired(self.groups[name], now)
            elif kind == RETRY:
                self._touched[name] = None

    def _tired(self, group: Group, now: float) -> Iterator[Action]:
        model = self.models[group.model]
        if not group.idle or now < group.since + model.spec.idle_s:
            return
        if model.live() - group.keep >= model.spec.least:
            yield from self._leave(group, now)
        else:
            self.timers.add(now + max(1.0, model.spec.idle_s), IDLE, group.name)

    def _advance(self, now: float) -> Iterator[Action]:
        while self._touched or self._freed:
            names = dict(self._touched)
            if self._freed:
                names |= self._blocked
            self._touched, self._freed = {}, False
            room = self._largest() if len(names) > 1 else None
            for name in names:
                if name in self.models:
                    yield from self._sent(self.models[name])
                    yield from self._grown(self.models[name], room, now)

    def _largest(self) -> int:
        return max((max(server.free) for server in self.roster.cluster.open()), default=0)

    def _sent(self, model: Deployment) -> Iterator[Action]:
        while (found := model.next_to_send()) is not None:
            request, group = found
            since = model.waiting.pop(request)
            self.held -= 1
            self._requests[request] = model.spec.name, since, group.name
            group.in_flight[request] = None
            self._idle.pop(group.name, None)
            yield Send(request, group.name)

    def _grown(self, model: Deployment, room: int | None, now: float) -> Iterator[Action]:
        name = model.spec.name
        while need := model.wanted(now):
            oldest = model.oldest()
            demand = model.spec.demand(0.0 if oldest is None else now - oldest, self.settings.beside)
            fits = room is None or demand.part(self.settings.most_ranks) <= room
            scheme = place(name, demand, self.roster.cluster, self.settings, need, now) if fits else None
            if scheme is None:
                self._blocked[name] = None
                yield from self._reclaim(model, now)
                return
            model.number, self.starts = model.number + 1, self.starts + 1
            group, orders = self.roster.launch(
                f"{name}#{model.number}", model.spec, demand, scheme, need, now
            )
            self.groups[group.name] = model.groups[group.name] = group
            yield from orders
        self._blocked.pop(name, None)
        self._reclaimed.pop(name, None)

    def _reclaim(self, model: Deployment, now: float) -> Iterator[Action]:
        """Let the group that is idle longest go, if its device will then hold the model; one at a time by model."""
        name, memory = model.spec.name, model.spec.memory
        if not self.settings.reclaim or self._leaving_for(name):
            return
        for candidate in self._idle:
            group, worker = self.groups[candidate], self.groups[candidate].workers[0]
            owner = self.models[group.model]
            free = self.roster.cluster.servers[worker.server].free[worker.device]
            if free + worker.memory >= memory and owner.live() - group.keep >= owner.spec.least:
                self._reclaimed[name] = worker.name
                yield from self._leave(group, now)
                return

    def _leaving_for(self, name: str) -> bool:
        return self._reclaimed.get(name, "") in self.roster.workers
