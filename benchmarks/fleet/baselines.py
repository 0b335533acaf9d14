"""Placements that ParaServe is compared with, and a cache of weights in host memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from math import inf

from coldstart.fleet import sizing
from coldstart.fleet.groups import GroupWorker
from coldstart.fleet.roster import FleetServer, Roster
from coldstart.fleet.sizing import Offer, Place, Scheme
from coldstart.fleet.specification import FleetModel, FleetSettings


class FirstFit(Roster):
    """One worker on the first server with room, regardless of its link."""

    def place(
        self, model: FleetModel, required: int, now: float, waited_s: float, avoided: Collection[str] = ()
    ) -> Scheme | None:
        return single(model, waited_s, map(shared, list(self.room(model, avoided))[:1]))

    def room(self, model: FleetModel, avoided: Collection[str]) -> Iterable[FleetServer]:
        return (server for server in self.open(avoided) if max(server.free) >= model.memory)


class Cached(FirstFit):
    """ParaServe's placement, on servers whose host memory keeps the weights of full workers, the latest used ones."""

    def __init__(self, settings: FleetSettings, host_memory: dict[str, int]) -> None:
        super().__init__(settings)
        self._limits, self._cached = host_memory, defaultdict[str, dict[str, int]](dict)

    def place(
        self, model: FleetModel, required: int, now: float, waited_s: float, avoided: Collection[str] = ()
    ) -> Scheme | None:
        known = (one for one in self.room(model, avoided) if model.name in self._cached[one.spec.name])
        return single(model, waited_s, map(at_hand, known)) or Roster.place(
            self, model, required, now, waited_s, avoided
        )

    def count_missing(self, server: FleetServer, model: str, size: int) -> int:
        cached = self._cached[server.spec.name]
        if model not in cached:
            return size
        cached[model] = cached.pop(model)
        return 0

    def record_fetched(self, worker: GroupWorker, now: float) -> None:
        super().record_fetched(worker, now)
        if worker.launch.ranks == 1 and not worker.launch.beside:
            self._remember(worker)

    def record_loaded(self, worker: GroupWorker, now: float) -> None:
        super().record_loaded(worker, now)
        if worker.launch.beside:
            self._remember(worker)

    def _remember(self, worker: GroupWorker) -> None:
        size, limit, cached = worker.launch.size, self._limits[worker.server], self._cached[worker.server]
        if size <= limit:
            cached.pop(worker.launch.model, None)
            cached[worker.launch.model] = size
            while sum(cached.values()) > limit:
                del cached[next(iter(cached))]


class Locality(Cached):
    """One worker where it is loaded first, with weights in host memory counted (ServerlessLLM)."""

    def place(
        self, model: FleetModel, required: int, now: float, waited_s: float, avoided: Collection[str] = ()
    ) -> Scheme | None:
        room, known = self.room(model, avoided), self._cached
        offers = (at_hand(one) if model.name in known[one.spec.name] else shared(one) for one in room)
        return single(model, waited_s, offers)


def at_hand(server: FleetServer) -> Offer:
    return Offer(server.spec.name, inf, server.spec.load, max(server.free))


def shared(server: FleetServer) -> Offer:
    """Return an offer of an equal share of the link, without a check of the deadlines of other fetches."""
    share = server.reservations.link.rate / (len(server.reservations.link.pending) + 1)
    return Offer(server.spec.name, share, server.spec.load, max(server.free))


def single(model: FleetModel, waited_s: float, offers: Iterable[Offer]) -> Scheme | None:
    """Return one worker where it is loaded first. It reserves no bandwidth: its fetch has no deadline."""
    timed = [
        (sizing.predict_loaded_s(model.costs, model.size, o.fetch_bytes_per_s, o.load_bytes_per_s), o)
        for o in offers
    ]
    if not timed:
        return None
    term, offer = min(timed, key=lambda one: (one[0], one[1].free, one[1].server))
    ttft = sizing.predict_ttft_s(model.group_costs(1), term, 1, 1, waited_s)
    place = Place(offer.server, model.size, model.memory, True)
    return Scheme((place,), term, ttft, sizing.predict_tpot_s(model.costs, 1, 1), meets=False)
