"""Placements that ParaServe is compared with, and a cache of weights in host memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from math import inf

from coldstart.fleet import sizing
from coldstart.fleet.groups import FleetWorker
from coldstart.fleet.roster import FleetServer, Roster
from coldstart.fleet.sizing import Demand, Offer, Place, Scheme
from coldstart.fleet.specification import FleetSettings


class FirstFit(Roster):
    """One worker on the first server with room, regardless of its link."""

    def place(
        self, model: str, demand: Demand, required: int, now: float, avoided: Collection[str] = ()
    ) -> Scheme | None:
        return single(demand, map(shared, list(self.room(demand, avoided))[:1]))

    def room(self, demand: Demand, avoided: Collection[str]) -> Iterable[FleetServer]:
        return (server for server in self.open(avoided) if max(server.free) >= demand.memory)


class Cached(FirstFit):
    """ParaServe's placement, on servers whose host memory keeps the weights of full workers, the latest used ones."""

    def __init__(self, settings: FleetSettings, host_memory: dict[str, int]) -> None:
        super().__init__(settings)
        self._limits, self._cached = host_memory, defaultdict[str, dict[str, int]](dict)

    def place(
        self, model: str, demand: Demand, required: int, now: float, avoided: Collection[str] = ()
    ) -> Scheme | None:
        known = (one for one in self.room(demand, avoided) if model in self._cached[one.spec.name])
        return single(demand, map(at_hand, known)) or Roster.place(
            self, model, demand, required, now, avoided
        )

    def count_missing(self, server: FleetServer, model: str, size: int) -> int:
        cached = self._cached[server.spec.name]
        if model not in cached:
            return size
        cached[model] = cached.pop(model)
        return 0

    def fetched(self, worker: FleetWorker, now: float) -> None:
        super().fetched(worker, now)
        if worker.whole and not worker.beside:
            self._remember(worker)

    def ready(self, worker: FleetWorker, now: float) -> None:
        super().ready(worker, now)
        if worker.beside:
            self._remember(worker)

    def _remember(self, worker: FleetWorker) -> None:
        size, limit, cached = (
            worker.size,
            self._limits[worker.server],
            self._cached[worker.server],
        )
        if size <= limit:
            cached.pop(worker.model, None)
            cached[worker.model] = size
            while sum(cached.values()) > limit:
                del cached[next(iter(cached))]


class Locality(Cached):
    """One worker where it is loaded first, with weights in host memory counted (ServerlessLLM)."""

    def place(
        self, model: str, demand: Demand, required: int, now: float, avoided: Collection[str] = ()
    ) -> Scheme | None:
        room = self.room(demand, avoided)
        return single(
            demand, (at_hand(one) if model in self._cached[one.spec.name] else shared(one) for one in room)
        )


def at_hand(server: FleetServer) -> Offer:
    return Offer(server.spec.name, inf, server.spec.load, max(server.free))


def shared(server: FleetServer) -> Offer:
    """Return an offer of an equal share of the link, without a check of the deadlines of other fetches."""
    share = server.reservations.link.rate / (len(server.reservations.link.pending) + 1)
    return Offer(server.spec.name, share, server.spec.load, max(server.free))


def single(demand: Demand, offers: Iterable[Offer]) -> Scheme | None:
    """Return one worker where it is loaded first. It reserves no bandwidth: its fetch has no deadline."""
    timed = [(sizing.loaded_s(demand.costs, demand.size, o.fetch, o.load), o) for o in offers]
    if not timed:
        return None
    term, offer = min(timed, key=lambda one: (one[0], one[1].free, one[1].server))
    ttft = sizing.ttft_s(demand.group_costs(1), term, 1, 1, demand.waited_s)
    place = Place(offer.server, demand.size, demand.memory, True)
    return Scheme((place,), term, ttft, sizing.tpot_s(demand.costs, 1, 1), meets=False)
