"""Growth of models: send waiting requests to groups with room, and launch groups where there are too few.

A model that fits on no server waits until memory becomes free, or until an idle group of another model has stopped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from coldstart.fleet.events import Action, Send
from coldstart.fleet.groups import Deployment
from coldstart.fleet.lives import GroupLives
from coldstart.fleet.sizing import Demand, Scheme


class Growth:
    """Growth of all models; `starts` counts launched groups."""

    def __init__(self, lives: GroupLives) -> None:
        self.lives, self.settings, self.models = lives, lives.settings, lives.models
        self.roster, self.agenda = lives.roster, lives.agenda
        self.starts = 0
        self._reclaimed: dict[str, str] = {}

    def advance(self, now: float) -> Iterator[Action]:
        """Process every model that has changed, until none has."""
        while names := self.agenda.take():
            room = self._largest() if len(names) > 1 else None
            for name in names:
                if name in self.models:
                    yield from self._send(self.models[name], now)
                    yield from self._grow(self.models[name], room, now)

    def _largest(self) -> int:
        return max((max(server.free) for server in self.roster.open()), default=0)

    def _send(self, model: Deployment, now: float) -> Iterator[Action]:
        while (found := model.next_to_send(now)) is not None:
            request, group = found
            self.agenda.send(request, group.name)
            self.lives.give(group, request)
            yield Send(request, group.name)

    def _grow(self, model: Deployment, room: int | None, now: float) -> Iterator[Action]:
        name = model.spec.name
        while need := model.wanted(now):
            if self._scale_up(model):
                continue
            demand = self._demand(model, now)
            fits = room is None or demand.part(self.settings.most_ranks) <= room
            scheme = None
            # A server where a start failed is tried again only if no other server has memory, or can free
            # some.
            for avoided in dict.fromkeys((model.avoided(now), frozenset[str]())):
                if fits:
                    scheme = self.roster.place(name, demand, need, now, avoided)
                if scheme is None:
                    yield from self._reclaim(model, now, avoided)
                if scheme is not None or self._leaving_for(name):
                    break
            if scheme is None:
                self.agenda.block(name)
                return
            yield from self._launch(model, demand, scheme, need, now)
        self.agenda.unblock(name)
        self._reclaimed.pop(name, None)

    def _demand(self, model: Deployment, now: float) -> Demand:
        oldest = model.oldest()
        return model.spec.demand(0.0 if oldest is None else now - oldest, self.settings.beside)

    def _launch(
        self, model: Deployment, demand: Demand, scheme: Scheme, need: int, now: float
    ) -> Iterator[Action]:
        self.starts += 1
        group, orders = self.roster.launch(model, demand, scheme, need, now)
        self.lives.add(group)
        yield from orders

    def _scale_up(self, model: Deployment) -> bool:
        """Let a starting pipeline serve more with one more of its workers; return whether one could.

        This is faster than a new start.
        """
        if not self.settings.consolidate:
            return False
        demand, batch = model.spec.demand(0.0, self.settings.beside), model.spec.batch
        groups = model.groups.values()
        return any(self.lives.keeps_more(one, batch, demand.full_memory(len(one.workers))) for one in groups)

    def _reclaim(self, model: Deployment, now: float, avoided: Collection[str]) -> Iterator[Action]:
        """Stop the longest idle group whose device then fits the model; at most one at a time per model."""
        name, memory = model.spec.name, model.spec.memory
        if not self.settings.reclaim or self._leaving_for(name):
            return
        for candidate in self.lives.idle:
            group, worker = self.lives.groups[candidate], self.lives.groups[candidate].workers[0]
            if worker.server in avoided:
                continue
            free = self.roster.servers[worker.server].free[worker.device]
            if free + worker.memory >= memory and self.models[group.model].spares(group):
                self._reclaimed[name] = worker.name
                yield from self.lives.stop(group, now)
                return

    def _leaving_for(self, name: str) -> bool:
        return self._reclaimed.get(name, "") in self.roster.workers
