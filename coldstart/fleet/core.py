"""Every decision of the fleet, without I/O: `on(event, now)` gives the actions that follow.

Invariants, after each event: a request goes only to a group all of whose workers are ready, in order of arrival by model;
a worker is told to stop only when nobody uses it; what is promised on a device or a link never exceeds it; a model whose
group died has its requests back in the queue, at their old places. Events of workers that are no more mean nothing, so a
controller that starts again may be told everything twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from coldstart.fleet import events
from coldstart.fleet.deployments import Deployment
from coldstart.fleet.events import Action, Event, Refuse, Send
from coldstart.fleet.groups import FleetWorker, Group
from coldstart.fleet.lives import HOLD, IDLE, RETRY, GroupLives
from coldstart.fleet.placement import place


class FleetCore(GroupLives):
    """`now` is in seconds on one clock that never goes back. `starts` counts groups, `moves` streams handed over."""

    def on(self, event: Event, now: float) -> list[Action]:
        """Take note, then order what can be done now."""
        return [*self._note(event, now), *self._timed(now), *self._advance(now), *self.roster.shares()]

    def deadline(self) -> float:
        """When `Tick` is due at the latest; infinity where nothing waits for time to pass."""
        return self.timers.next()

    # What happened.

    def _note(self, event: Event, now: float) -> Iterator[Action]:
        match event:
            case events.Arrived(request, name):
                yield from self._arrived(request, name, now)
            case events.Routed(request, name, group):
                yield from self._routed(request, name, group, now)
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
                self.roster.measured(server, bandwidth, now)
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
            case events.WorkerDied(_, reason, own):
                yield from self._died(worker, reason, now, own=own)
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

    def _routed(self, request: str, name: str, group: str, now: float) -> Iterator[Action]:
        """Count it where it is. One that was sent to a pipeline as that was left follows the others.

        Any other whose group is gone is its gateway's affair.
        """
        known = self.groups.get(group)
        if request in self._requests or name not in self.models or (known and known.model != name):
            return
        moves = self._consolidation.move(request, group, self.groups)
        if known is None and not moves:
            return
        self.models[name].window.arrived(now)
        self._requests[request] = name, now, group
        if known is not None:
            known.in_flight[request] = None
            self._idle.pop(group, None)
        self.moves += len(moves)
        yield from moves

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
            if self._scaled_up(model):
                continue
            oldest = model.oldest()
            demand = model.spec.demand(0.0 if oldest is None else now - oldest, self.settings.beside)
            fits = room is None or demand.part(self.settings.most_ranks) <= room
            cluster, scheme = self.roster.cluster, None
            # Where its start failed it is tried again only if no other server has room, or can make some.
            for avoided in dict.fromkeys((model.avoided(now), frozenset[str]())):
                if fits:
                    scheme = place(name, demand, cluster, self.settings, need, now, avoided)
                if scheme is None:
                    yield from self._reclaim(model, now, avoided)
                if scheme is not None or self._leaving_for(name):
                    break
            if scheme is None:
                self._blocked[name] = None
                return
            model.number, self.starts = model.number + 1, self.starts + 1
            group, orders = self.roster.launch(
                f"{name}#{model.number}", model.spec, demand, scheme, need, now
            )
            self.groups[group.name] = model.groups[group.name] = group
            yield from orders
        self._blocked.pop(name, None)
        self._reclaimed.pop(name, None)

    def _scaled_up(self, model: Deployment) -> bool:
        """Whether a pipeline of the model that starts can take more by one more of its workers: no start is as soon there."""
        if not self.settings.consolidate:
            return False
        demand, batch = model.spec.demand(0.0, self.settings.beside), model.spec.batch
        groups = model.groups.values()
        return any(
            self._consolidation.keeps_more(one, batch, demand.whole(len(one.workers))) for one in groups
        )

    def _reclaim(self, model: Deployment, now: float, avoided: Collection[str]) -> Iterator[Action]:
        """Let the group that is idle longest go, if its device will then hold the model; one at a time by model."""
        name, memory = model.spec.name, model.spec.memory
        if not self.settings.reclaim or self._leaving_for(name):
            return
        for candidate in self._idle:
            group, worker = self.groups[candidate], self.groups[candidate].workers[0]
            if worker.server in avoided:
                continue
            owner = self.models[group.model]
            free = self.roster.cluster.servers[worker.server].free[worker.device]
            if free + worker.memory >= memory and owner.live() - group.keep >= owner.spec.least:
                self._reclaimed[name] = worker.name
                yield from self._leave(group, now)
                return

    def _leaving_for(self, name: str) -> bool:
        return self._reclaimed.get(name, "") in self.roster.workers
