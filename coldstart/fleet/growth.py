"""Growth of models: send waiting requests to groups with room, and launch groups where there are too few.

A model that fits on no server waits until memory becomes free, or until an idle group of another model has stopped.

Placement `pipeline` uses a server that caches the weights, else Algorithm 1 of ParaServe over the offers of the bandwidth
reservations (Algorithm 2). Baselines are `first-fit`, one worker on the first server with room, regardless of its link, and
`locality`, one worker where it is loaded first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from math import inf

from coldstart.fleet import timing
from coldstart.fleet.deployments import Deployment
from coldstart.fleet.events import Action, Send
from coldstart.fleet.groups import name_group
from coldstart.fleet.lives import GroupLives
from coldstart.fleet.requests import Recheck, Requests
from coldstart.fleet.roster import Cluster, FleetServer, Roster
from coldstart.fleet.sizing import Demand, Offer, Place, Scheme, choose
from coldstart.fleet.specification import FIRST_FIT, PIPELINE, FleetSettings


def place(
    model: str,
    demand: Demand,
    cluster: Cluster,
    settings: FleetSettings,
    required: int,
    now: float,
    avoided: Collection[str] = (),
) -> Scheme | None:
    """Return the scheme of the start, or None if the model must wait; servers in `avoided` are not used."""
    room = [server for server in cluster.open(avoided) if max(server.free) >= demand.memory]
    if settings.placement == FIRST_FIT:
        return _single(demand, map(_shared, room), first=True)
    if settings.placement != PIPELINE:
        timed = (_at_hand(server) if model in server.cached else _shared(server) for server in room)
        return _single(demand, timed)
    if settings.cache and (kept := _single(demand, (_at_hand(one) for one in room if model in one.cached))):
        return kept
    least = min(demand.part(ranks) for ranks in range(1, settings.most_ranks + 1))
    return choose(
        demand,
        cluster.offers(now, least, avoided),
        required=required,
        consolidate=settings.consolidate,
        most=settings.most_ranks,
    )


def _at_hand(server: FleetServer) -> Offer:
    return Offer(server.spec.name, inf, server.spec.load, max(server.free))


def _shared(server: FleetServer) -> Offer:
    """Return an offer of an equal share of the link, without a check of the deadlines of other fetches."""
    share = server.reservations.link.rate / (len(server.reservations.link.pending) + 1)
    return Offer(server.spec.name, share, server.spec.load, max(server.free))


def _single(demand: Demand, offers: Iterable[Offer], first: bool = False) -> Scheme | None:
    timed = [(timing.loaded_s(demand.costs, demand.size, o.fetch, o.load), o) for o in offers]
    if not timed:
        return None
    term, offer = timed[0] if first else min(timed, key=lambda one: (one[0], one[1].free, one[1].server))
    ttft = timing.ttft_s(demand.group_costs(1), term, 1, 1, demand.waited_s)
    tpot = timing.tpot_s(demand.costs, 1, 1)
    meets = ttft <= demand.ttft_s and tpot <= demand.tpot_s
    return Scheme((Place(offer.server, demand.size, demand.memory, True),), term, ttft, tpot, meets)


class Growth:
    """Growth of all models; `starts` counts launched groups."""

    def __init__(
        self,
        settings: FleetSettings,
        models: dict[str, Deployment],
        roster: Roster,
        requests: Requests,
        lives: GroupLives,
        recheck: Recheck,
    ) -> None:
        self.settings, self.models, self.roster = settings, models, roster
        self.requests, self.lives, self.recheck = requests, lives, recheck
        self.starts = 0
        self._reclaimed: dict[str, str] = {}

    def advance(self, now: float) -> Iterator[Action]:
        """Process every model that has changed, until none has."""
        while names := self.recheck.take():
            room = self._largest() if len(names) > 1 else None
            for name in names:
                if name in self.models:
                    yield from self._send(self.models[name], now)
                    yield from self._grow(self.models[name], room, now)

    def _largest(self) -> int:
        return max((max(server.free) for server in self.roster.cluster.open()), default=0)

    def _send(self, model: Deployment, now: float) -> Iterator[Action]:
        while (found := model.next_to_send(now)) is not None:
            request, group = found
            self.requests.send(request, group.name)
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
                    scheme = place(name, demand, self.roster.cluster, self.settings, need, now, avoided)
                if scheme is None:
                    yield from self._reclaim(model, now, avoided)
                if scheme is not None or self._leaving_for(name):
                    break
            if scheme is None:
                self.recheck.block(name)
                return
            yield from self._launch(model, demand, scheme, need, now)
        self.recheck.unblock(name)
        self._reclaimed.pop(name, None)

    def _demand(self, model: Deployment, now: float) -> Demand:
        oldest = model.oldest()
        return model.spec.demand(0.0 if oldest is None else now - oldest, self.settings.beside)

    def _launch(
        self, model: Deployment, demand: Demand, scheme: Scheme, need: int, now: float
    ) -> Iterator[Action]:
        model.number, self.starts = model.number + 1, self.starts + 1
        name = name_group(model.spec.name, model.number)
        group, orders = self.roster.launch(name, model.spec, demand, scheme, need, now)
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
        return any(
            self.lives.consolidation.keeps_more(one, batch, demand.full_memory(len(one.workers)))
            for one in groups
        )

    def _reclaim(self, model: Deployment, now: float, avoided: Collection[str]) -> Iterator[Action]:
        """Stop the longest idle group whose device then fits the model; at most one at a time per model."""
        name, memory = model.spec.name, model.spec.memory
        if not self.settings.reclaim or self._leaving_for(name):
            return
        for candidate in self.lives.idle:
            group, worker = self.lives.groups[candidate], self.lives.groups[candidate].workers[0]
            if worker.server in avoided:
                continue
            free = self.roster.cluster.servers[worker.server].free[worker.device]
            if free + worker.memory >= memory and self.models[group.model].spares(group):
                self._reclaimed[name] = worker.name
                yield from self.lives.stop(group, now)
                return

    def _leaving_for(self, name: str) -> bool:
        return self._reclaimed.get(name, "") in self.roster.workers
