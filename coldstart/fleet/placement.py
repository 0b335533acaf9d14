"""Where a cold model starts: ParaServe's way and the two it is compared with.

`pipeline`: where its weights lie in host memory, else by Algorithm 1 over what the ledgers offer (Algorithm 2). `first-fit`:
one worker on the first server with room, whatever its link carries. `locality`: one worker where it would be loaded first.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from coldstart.fleet import timing
from coldstart.fleet.cluster import Cluster, FleetServer
from coldstart.fleet.sizing import Demand, Offer, Place, Scheme, choose
from coldstart.fleet.specification import FIRST_FIT, PIPELINE, FleetSettings


def place(
    model: str, demand: Demand, cluster: Cluster, settings: FleetSettings, required: int, now: float
) -> Scheme | None:
    """The scheme to start by, or None where the model has to wait."""
    if settings.placement == FIRST_FIT:
        return _single(demand, _fitting(demand, cluster), first=True)
    if settings.placement != PIPELINE:
        return _single(demand, _timed(model, demand, cluster))
    if settings.cache and (kept := _single(demand, _kept(model, demand, cluster))):
        return kept
    least = min(demand.part(ranks) for ranks in range(1, settings.most_ranks + 1))
    return choose(
        demand,
        cluster.offers(now, least),
        required=required,
        consolidate=settings.consolidate,
        most=settings.most_ranks,
    )


def _room(demand: Demand, cluster: Cluster) -> list[FleetServer]:
    return [server for server in cluster.open() if max(server.free) >= demand.memory]


def _fitting(demand: Demand, cluster: Cluster) -> list[Offer]:
    return [_shared(server) for server in _room(demand, cluster)]


def _kept(model: str, demand: Demand, cluster: Cluster) -> list[Offer]:
    return [_at_hand(server) for server in _room(demand, cluster) if model in server.cached]


def _timed(model: str, demand: Demand, cluster: Cluster) -> list[Offer]:
    room = _room(demand, cluster)
    return [_at_hand(server) if model in server.cached else _shared(server) for server in room]


def _at_hand(server: FleetServer) -> Offer:
    return Offer(server.spec.name, inf, server.spec.load, max(server.free))


def _shared(server: FleetServer) -> Offer:
    """An equal share of the link, whoever that makes late."""
    share = server.ledger.link.rate / (len(server.ledger.link.pending) + 1)
    return Offer(server.spec.name, share, server.spec.load, max(server.free))


def _single(demand: Demand, offers: Iterable[Offer], first: bool = False) -> Scheme | None:
    timed = [(timing.loaded_s(demand.costs, demand.size, o.fetch, o.load), o) for o in offers]
    if not timed:
        return None
    term, offer = timed[0] if first else min(timed, key=lambda one: (one[0], one[1].free, one[1].server))
    ttft = timing.ttft_s(demand.costs_of(1), term, 1, 1, demand.waited_s)
    tpot = timing.tpot_s(demand.costs, 1, 1)
    meets = ttft <= demand.ttft_s and tpot <= demand.tpot_s
    return Scheme((Place(offer.server, demand.size, demand.memory, True),), term, ttft, tpot, meets)
