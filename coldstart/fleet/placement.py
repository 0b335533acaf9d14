"""Placement of a cold model: ParaServe's algorithm and two baselines.

`pipeline`: a server that caches the weights, else Algorithm 1 over the offers of the bandwidth reservations
(Algorithm 2). `first-fit`: one worker on the first server with room, regardless of its link. `locality`: one worker
where it is loaded first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import inf

from coldstart.fleet import timing
from coldstart.fleet.roster import Cluster, FleetServer
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
