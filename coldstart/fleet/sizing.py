"""On how many servers, and on which, a cold model starts (ParaServe, Algorithm 1, corrected).

Corrections: candidates for the remaining ranks are sorted ascending like the others, and a server holds one rank; the sort
key is the whole term of `timing`, not 1/b + 1/p, because equation 5 is no sum, and by that key the greedy choice is exact; a
group that is consolidated later needs a full worker to consolidate into; a fall-back that no server can hold is no scheme.

Invariant: the scheme is the first, in the order of `sizes` and of full workers ascending, that any choice of servers
could make meet the SLO; and no choice of servers for it is faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf

from coldstart.fleet import timing
from coldstart.fleet.timing import Costs

MOST_RANKS = 4


@dataclass(frozen=True, slots=True)
class Offer:
    """What a server has now: bytes/s to fetch with (0: it takes nobody) and to load with, bytes free on its emptiest device."""

    server: str
    fetch: float
    load: float
    free: int


@dataclass(frozen=True, slots=True)
class Demand:
    """A model to start: bytes of its weights, device bytes to serve with, limits of TTFT and TPOT in s, time waited already.

    `shares` are the real bytes of each rank by number of ranks, where they are known; else ranks are equal. With `beside` a
    worker that becomes whole loads beside its rank and holds both until the switch. `joins` are as FleetModel has them.
    """

    size: int
    memory: int
    costs: Costs
    ttft_s: float = inf
    tpot_s: float = inf
    waited_s: float = 0.0
    shares: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    beside: bool = False
    joins: Mapping[int, float] = field(default_factory=dict)

    def costs_of(self, count: int) -> Costs:
        """Of a group of so many: what joining took, where that was observed, in the place of what it was said to take."""
        seen = self.joins.get(count)
        return self.costs if seen is None else replace(self.costs, join_s=seen / count)

    def ranks(self, count: int) -> tuple[int, ...]:
        """Bytes by rank."""
        if count in self.shares:
            return self.shares[count]
        return tuple(self.size * (r + 1) // count - self.size * r // count for r in range(count))

    def whole(self, count: int) -> int:
        """Device bytes of a full worker in a group of `count`."""
        return self.memory + (max(self.ranks(count)) if self.beside and count > 1 else 0)

    def part(self, count: int) -> int:
        """Device bytes of any other worker: in proportion (section 4.1.2), at least its weights."""
        return max(ceil(self.memory / count), *self.ranks(count))


@dataclass(frozen=True, slots=True)
class Place:
    """One rank: where, its bytes, the device bytes it takes, and whether it may become the whole model."""

    server: str
    size: int
    memory: int
    full: bool


@dataclass(frozen=True, slots=True)
class Scheme:
    """Places in the order of the pipeline; the prediction, from the largest rank; whether it keeps the SLO."""

    places: tuple[Place, ...]
    term_s: float
    ttft_s: float
    tpot_s: float
    meets: bool

    @property
    def full(self) -> int:
        return sum(place.full for place in self.places)


def sizes(required: int, most: int = MOST_RANKS) -> Iterator[int]:
    """Group sizes in order of preference: no smaller than what is required (section 6.1), ascending; then the largest below."""
    least = min(max(1, required), most)
    yield from range(least, most + 1)
    yield from range(least - 1, 0, -1)


def fewest_full(ranks: int, required: int, consolidate: bool) -> int:
    """Full workers that a group needs at least: as many as are to remain of it."""
    return max(1, min(ranks, required)) if consolidate or ranks == 1 else 0


def choose(
    demand: Demand,
    offers: Iterable[Offer],
    *,
    required: int = 1,
    consolidate: bool = True,
    most: int = MOST_RANKS,
) -> Scheme | None:
    """The smallest scheme that keeps the SLO; else one worker where it is fastest; None where none fits: the model waits."""
    open_ = [offer for offer in offers if offer.fetch > 0]
    every = considered(demand, open_, required=required, consolidate=consolidate, most=most)
    chosen = next((scheme for scheme in every if scheme.meets), None)
    return chosen or _scheme(demand, _ordered(demand, open_, 1), 1, 1)


def considered(
    demand: Demand,
    offers: Sequence[Offer],
    *,
    required: int = 1,
    consolidate: bool = True,
    most: int = MOST_RANKS,
) -> Iterator[Scheme]:
    """The best scheme of every size and number of full workers that fits, in the order in which they are preferred."""
    for ranks in sizes(required, most):
        ordered = _ordered(demand, offers, ranks)
        for full in range(fewest_full(ranks, required, consolidate), ranks + 1):
            if (found := _scheme(demand, ordered, ranks, full)) is not None:
                yield found


def _ordered(demand: Demand, offers: Sequence[Offer], ranks: int) -> list[tuple[float, Offer]]:
    """Servers that fit a part, by term; among equals the fullest first, so that whole devices stay free."""
    size, least = max(demand.ranks(ranks)), demand.part(ranks) if ranks > 1 else demand.whole(1)
    timed = [
        (timing.loaded_s(demand.costs, size, offer.fetch, offer.load), offer)
        for offer in offers
        if offer.free >= least
    ]
    return sorted(timed, key=lambda one: (one[0], one[1].free, -one[1].fetch, one[1].server))


def _scheme(demand: Demand, ordered: list[tuple[float, Offer]], ranks: int, full: int) -> Scheme | None:
    if len(ordered) < ranks:
        return None
    memory = demand.whole(ranks)
    whole = [one for one in ordered if one[1].free >= memory][:full]
    if len(whole) < full:
        return None
    taken = {offer.server for _, offer in whole}
    parts = [one for one in ordered if one[1].server not in taken][: ranks - full]
    term = max(term for term, _ in (*whole, *parts))
    ttft = timing.ttft_s(demand.costs_of(ranks), term, ranks, full, demand.waited_s)
    tpot = timing.tpot_s(demand.costs, ranks, full)
    meets = ttft <= demand.ttft_s and tpot <= demand.tpot_s
    places = _dealt(demand, [(offer, True) for _, offer in whole] + [(offer, False) for _, offer in parts])
    return Scheme(places, term, ttft, tpot, meets)


def _dealt(demand: Demand, chosen: list[tuple[Offer, bool]]) -> tuple[Place, ...]:
    """The largest rank to the quickest link. Full workers come first of equals, for rank 0 is the one to remain."""
    count = len(chosen)
    sizes = demand.ranks(count)
    quickest = sorted(chosen, key=lambda one: (-one[0].fetch, not one[1]))
    largest = sorted(range(count), key=lambda rank: (-sizes[rank], rank))
    dealt = dict(zip(largest, quickest, strict=True))
    memory = {True: demand.whole(count), False: demand.part(count)}
    return tuple(
        Place(dealt[rank][0].server, sizes[rank], memory[dealt[rank][1]], dealt[rank][1])
        for rank in range(count)
    )
