"""Number and choice of servers for a cold start (ParaServe, Algorithm 1, corrected).

Corrections: candidates for the remaining ranks are sorted in ascending order like the others, and a server holds one
rank. The sort key is the complete term_x, not 1/b + 1/p, because equation 5 is not a sum, and with that key
the greedy choice is exact. A group that is consolidated later needs a full worker to consolidate into. A fallback
that no server can hold is not a scheme.

Invariant: the scheme is the first, in the order of `sizes` and of full workers ascending, with which any choice of
servers could meet the SLO; and no choice of servers for it is faster.

Time to first token (ParaServe, equations 1, 2 and 5):

TTFT = t_w + max over ranks x of term_x + t_j s + t_p (s - w + w/s) + t_n s.
TPOT = t_d (s - w + w/s) + t_n s.

Of s ranks, w have the memory, and so the compute share, of a full model. term_x is the time until rank x
has loaded its m_x bytes, with b_x bytes/s from the network and p_x to the device:

sequential    t_cc + t_cu + t_l + m_x/b_x + m_x/p_x           (equation 1);
full          max(t_cc + t_cu + max(m_x/p_x, t_l), m_x/b_x)   (equation 5).

t_j, once per rank and start, is not in the paper: the time that ranks take to connect is not part of the cost of a
token. All values are in seconds, bytes and bytes per second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from coldstart.fleet.specification import MOST_RANKS, Costs, FleetModel, FleetSettings, Overlap


def fetch_s(size: float, rate: float) -> float:
    """Return the seconds to move `size` bytes; infinity at rate 0, 0 for no bytes."""
    return size / rate if rate > 0 else (inf if size else 0.0)


def loaded_s(costs: Costs, size: float, fetch: float, load: float) -> float:
    """Return term_x: seconds from the decision until a rank of `size` bytes is loaded."""
    return loaded_after(costs, size, load, fetched_s=fetch_begin_s(costs) + fetch_s(size, fetch))


def loaded_after(costs: Costs, size: float, load: float, fetched_s: float) -> float:
    """Return term_x if the last byte arrives `fetched_s` after the decision."""
    copy = fetch_s(size, load)
    if costs.overlap is Overlap.SEQUENTIAL:
        return fetched_s + copy
    return max(costs.container_s + costs.context_s + max(copy, costs.library_s), fetched_s)


def fetch_begin_s(costs: Costs) -> float:
    """Return when the fetch begins: at the decision, or after the runtime in a sequential start, where the worker fetches."""
    return costs.runtime_s if costs.overlap is Overlap.SEQUENTIAL else 0.0


def slowdown(ranks: int, full: int) -> float:
    """Return s - w + w/s: a full rank computes its 1/s of the layers at full speed, another one at 1/s of it."""
    return ranks - full + full / ranks


def first_token_s(costs: Costs, ranks: int, full: int) -> float:
    """Return the seconds from the ready group to the first token; `full` ranks have memory for a full model."""
    return costs.prefill_s * slowdown(ranks, full) + costs.hop_s * ranks


def tpot_s(costs: Costs, ranks: int, full: int) -> float:
    """Return the time per output token (equation 2)."""
    return costs.decode_s * slowdown(ranks, full) + costs.hop_s * ranks


def ttft_s(costs: Costs, slowest_s: float, ranks: int, full: int, waited_s: float = 0.0) -> float:
    """Return the time to first token (ParaServe, equations 1 and 5).

    `slowest_s` is the largest term of the start, `full` the number of ranks with the memory of a full model.
    """
    return waited_s + slowest_s + costs.join_s * ranks + first_token_s(costs, ranks, full)


@dataclass(frozen=True, slots=True)
class Offer:
    """Resources of a server: bytes/s for a fetch (0: none accepted) and for a load; bytes free on its emptiest device."""

    server: str
    fetch: float
    load: float
    free: int


@dataclass(frozen=True, slots=True)
class Place:
    """Placement of one rank: server, bytes of weights, device bytes, and whether it may hold the full model later."""

    server: str
    size: int
    memory: int
    full: bool


@dataclass(frozen=True, slots=True)
class Scheme:
    """Placements in pipeline order, the prediction by the largest rank, and whether it meets the SLO."""

    places: tuple[Place, ...]
    term_s: float
    ttft_s: float
    tpot_s: float
    meets: bool

    @property
    def full(self) -> int:
        return sum(place.full for place in self.places)


def sizes(required: int, most: int = MOST_RANKS) -> Iterator[int]:
    """Yield group sizes in order of preference: from `required` (section 6.1) upwards, then smaller ones downwards."""
    least = min(max(1, required), most)
    yield from range(least, most + 1)
    yield from range(least - 1, 0, -1)


def fewest_full(ranks: int, required: int, consolidate: bool) -> int:
    """Return the minimum number of full workers of a group: those that remain after consolidation."""
    return max(1, min(ranks, required)) if consolidate or ranks == 1 else 0


def choose(
    model: FleetModel,
    offers: Iterable[Offer],
    settings: FleetSettings,
    *,
    required: int = 1,
    waited_s: float = 0.0,
) -> Scheme | None:
    """Return the smallest scheme that meets the SLO, else the fastest single worker, else None: the model must wait.

    The oldest request has already waited `waited_s` seconds.
    """
    open_ = [offer for offer in offers if offer.fetch > 0]
    every = considered(model, open_, settings, required=required, waited_s=waited_s)
    chosen = next((scheme for scheme in every if scheme.meets), None)
    return chosen or _scheme(model, _ordered(model, open_, settings, 1), settings, 1, 1, waited_s)


def considered(
    model: FleetModel,
    offers: Sequence[Offer],
    settings: FleetSettings,
    *,
    required: int = 1,
    waited_s: float = 0.0,
) -> Iterator[Scheme]:
    """Yield the best scheme of each size and number of full workers that fits, in order of preference."""
    for ranks in sizes(required, settings.most_ranks):
        ordered = _ordered(model, offers, settings, ranks)
        for full in range(fewest_full(ranks, required, settings.consolidate), ranks + 1):
            if (found := _scheme(model, ordered, settings, ranks, full, waited_s)) is not None:
                yield found


def _ordered(
    model: FleetModel, offers: Sequence[Offer], settings: FleetSettings, ranks: int
) -> list[tuple[float, Offer]]:
    """Return the servers that fit a part, by term; among equals the fullest first, so that empty devices stay free."""
    size = max(model.ranks(ranks))
    least = model.part(ranks) if ranks > 1 else model.memory
    timed = [
        (loaded_s(model.costs, size, offer.fetch, offer.load), offer)
        for offer in offers
        if offer.free >= least
    ]
    return sorted(timed, key=lambda one: (one[0], one[1].free, -one[1].fetch, one[1].server))


def _scheme(
    model: FleetModel,
    ordered: list[tuple[float, Offer]],
    settings: FleetSettings,
    ranks: int,
    full: int,
    waited_s: float,
) -> Scheme | None:
    if len(ordered) < ranks:
        return None
    memory = model.full_memory(ranks, settings.beside)
    whole = [one for one in ordered if one[1].free >= memory][:full]
    if len(whole) < full:
        return None
    taken = {offer.server for _, offer in whole}
    parts = [one for one in ordered if one[1].server not in taken][: ranks - full]
    term = max(term for term, _ in (*whole, *parts))
    ttft = ttft_s(model.group_costs(ranks), term, ranks, full, waited_s)
    tpot = tpot_s(model.costs, ranks, full)
    meets = ttft <= model.ttft_s and tpot <= model.tpot_s
    memories = {True: memory, False: model.part(ranks)}
    chosen = [(offer, True) for _, offer in whole] + [(offer, False) for _, offer in parts]
    return Scheme(_dealt(model.ranks(ranks), memories, chosen), term, ttft, tpot, meets)


def _dealt(
    parts: Sequence[int], memory: dict[bool, int], chosen: list[tuple[Offer, bool]]
) -> tuple[Place, ...]:
    """Assign the largest rank to the fastest link. Of equals full workers come first, because rank 0 remains."""
    count = range(len(chosen))
    quickest = sorted(chosen, key=lambda one: (-one[0].fetch, not one[1]))
    largest = sorted(count, key=lambda rank: (-parts[rank], rank))
    dealt = dict(zip(largest, quickest, strict=True))
    places = ((parts[rank], *dealt[rank]) for rank in count)
    return tuple(Place(offer.server, size, memory[full], full) for size, offer, full in places)
