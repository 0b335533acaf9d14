"""Choose the servers for a cold start, and how many of them (ParaServe, Algorithm 1, corrected).

Corrections: candidates for the remaining ranks are sorted in ascending order like the others, and a server holds one
rank. The sort key is the complete term_x rather than 1/b + 1/p: equation 5 is not a sum, and sorting by term_x makes the
greedy choice optimal. A group that is consolidated later needs a full worker to consolidate into. A fallback that fits on
no server is not returned. Neither is a pipeline that is not faster than one worker: starting its ranks may cost more time
than their parallel fetches save.

Invariant: schemes are tried in the order of `list_group_sizes`, then by ascending number of full workers. The result is
the first one for which at least one choice of servers meets the SLO. No other choice of servers for it has a shorter
slowest term.

Time to first token (ParaServe, equations 1, 2 and 5):

TTFT = t_w + max over ranks x of term_x + t_j s + t_p (s - w + w/s) + t_n s.
TPOT = t_d (s - w + w/s) + t_n s.

t_w is the time that the oldest request has already waited. `Costs` defines the other times. Of s ranks, w have the
memory, and therefore the compute share, of a full model. term_x is the time until rank x has loaded its m_x bytes, with
b_x bytes/s from the network and p_x to the device:

sequential    t_cc + t_cu + t_l + m_x/b_x + m_x/p_x           (equation 1);
full          max(t_cc + t_cu + max(m_x/p_x, t_l), m_x/b_x)   (equation 5).

t_j (not in the paper) is the time that one rank takes to join the group. It is paid once per start, so it is kept out of
t_n, which is paid for every token. All values are in seconds, bytes and bytes per second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf

from coldstart.fleet.specification import MOST_RANKS, Costs, FleetModel, FleetSettings, Overlap


def fetch_s(size: float, rate: float) -> float:
    """Return the seconds to transfer `size` bytes at `rate` bytes per second: infinity at rate 0, and 0 for no bytes."""
    return size / rate if rate > 0 else (inf if size else 0.0)


def predict_loaded_s(costs: Costs, size: float, fetch: float, load: float) -> float:
    """Return the seconds from the decision until a rank is loaded (term_x). `fetch` and `load` are in bytes per second."""
    return predict_loaded_after_s(
        costs, size, load, fetched_s=predict_fetch_begin_s(costs) + fetch_s(size, fetch)
    )


def predict_loaded_after_s(costs: Costs, size: float, load: float, fetched_s: float) -> float:
    """Return the seconds until a rank is loaded (term_x) if its last byte arrives `fetched_s` seconds after the decision."""
    copy = fetch_s(size, load)
    if costs.overlap is Overlap.SEQUENTIAL:
        return fetched_s + copy
    return max(costs.container_s + costs.context_s + max(copy, costs.library_s), fetched_s)


def predict_fetch_begin_s(costs: Costs) -> float:
    """Return the seconds until the fetch begins: 0, or the time until the runtime is ready if the start is sequential."""
    return costs.runtime_s if costs.overlap is Overlap.SEQUENTIAL else 0.0


def compute_slowdown(ranks: int, full: int) -> float:
    """Return the slowdown s - w + w/s of a group with s `ranks`, of which w (`full`) compute at full speed."""
    return ranks - full + full / ranks


def predict_first_token_s(costs: Costs, ranks: int, full: int) -> float:
    """Return the seconds from a ready group to its first token. `full` of its ranks have the memory of a full model."""
    return costs.prefill_s * compute_slowdown(ranks, full) + costs.hop_s * ranks


def predict_tpot_s(costs: Costs, ranks: int, full: int) -> float:
    """Return the time per output token in seconds (ParaServe, equation 2). `full` of the ranks have full weights."""
    return costs.decode_s * compute_slowdown(ranks, full) + costs.hop_s * ranks


def predict_ttft_s(costs: Costs, slowest_s: float, ranks: int, full: int, waited_s: float = 0.0) -> float:
    """Return the time to first token in seconds (ParaServe, equations 1 and 5).

    `slowest_s` is the largest term_x of the ranks. `full` is the number of ranks with the memory of a full model.
    """
    return waited_s + slowest_s + costs.join_s * ranks + predict_first_token_s(costs, ranks, full)


@dataclass(frozen=True, slots=True)
class Offer:
    """Resources that a server offers for a rank. A server with a fetch rate of 0 accepts no fetch.

    `load_bytes_per_s` is the rate from host memory to a device. `free` is the number of free bytes on its emptiest device.
    """

    server: str
    fetch_bytes_per_s: float
    load_bytes_per_s: float
    free: int


@dataclass(frozen=True, slots=True)
class Place:
    """Placement of one rank: its server, weight bytes and device bytes, and whether it can hold the full model later."""

    server: str
    size: int
    memory: int
    full: bool


@dataclass(frozen=True, slots=True)
class Scheme:
    """Placement of a group: its ranks in pipeline order, predicted times, whether they meet the SLO, and why it was chosen."""

    places: tuple[Place, ...]
    term_s: float
    ttft_s: float
    tpot_s: float
    meets: bool
    reason: str = ""

    @property
    def full(self) -> int:
        return sum(place.full for place in self.places)


def list_group_sizes(required: int, most: int = MOST_RANKS) -> Iterator[int]:
    """Yield group sizes in order of preference: `required` up to `most`, then smaller sizes in descending order."""
    least = min(max(1, required), most)
    yield from range(least, most + 1)
    yield from range(least - 1, 0, -1)


Hops = Mapping[tuple[str, str], float]
"""Measured transfer times between pairs of servers in seconds, by their names in alphabetical order."""


def choose(
    model: FleetModel,
    offers: Iterable[Offer],
    settings: FleetSettings,
    *,
    required: int = 1,
    waited_s: float = 0.0,
    hops: Hops | None = None,
) -> Scheme | None:
    """Return the first placement in order of preference that meets the SLO, else the fastest single worker.

    Return None if the model must wait. A pipeline is chosen only if it is faster than a single worker. The model needs
    `required` workers, and its oldest request has already waited `waited_s` seconds. For server pairs in `hops`, the
    measured time replaces the hop time in the model's costs.
    """
    open_ = [offer for offer in offers if offer.fetch_bytes_per_s > 0]
    # The scheme of a single worker is considered first, unless more workers are required.
    single = None
    if required > 1:
        single = _build_scheme(model, _order_offers(model, open_, 1), 1, 1, waited_s, None)
    tried: list[Scheme] = []
    for scheme in list_schemes(model, open_, settings, required=required, waited_s=waited_s, hops=hops):
        tried.append(scheme)
        if len(scheme.places) == 1:
            single = scheme
        if scheme.meets and (len(scheme.places) == 1 or single is None or scheme.ttft_s < single.ttft_s):
            return replace(scheme, reason=_explain(model, scheme, single, required))
    return single and replace(single, reason=_explain_failure(model, tried, settings))


def _explain(model: FleetModel, scheme: Scheme, single: Scheme | None, required: int) -> str:
    ranks = len(scheme.places)
    if ranks == 1:
        limited = model.ttft_s < inf or model.tpot_s < inf
        return "one worker meets the limits" if limited else "one worker, because the model has no limits"
    if single is None:
        return f"no server has the memory for a full worker, but {ranks} servers have it for a pipeline rank each"
    if single.meets:
        return (
            f"the load needs {required} workers, and a pipeline of {ranks} ranks responds after {scheme.ttft_s:.1f} s, "
            f"a single worker after {single.ttft_s:.1f} s"
        )
    return (
        f"a single worker responds after {single.ttft_s:.1f} s, a pipeline of {ranks} ranks after "
        f"{scheme.ttft_s:.1f} s; the limit is {model.ttft_s:g} s"
    )


def _explain_failure(model: FleetModel, tried: Sequence[Scheme], settings: FleetSettings) -> str:
    """Return why a single worker was chosen although it does not meet the SLO."""
    limits = (("first token", model.ttft_s, "ttft_s"), ("token", model.tpot_s, "tpot_s"))
    best = [
        f"{name} {min(getattr(one, member) for one in tried):.3g} s at best, limit {limit:g} s"
        for name, limit, member in limits
        if limit < inf and tried
    ]
    missing = [
        f"{ranks} ranks: {why}" for ranks, why in model.unavailable.items() if ranks <= settings.most_ranks
    ]
    return "; ".join(["one worker, because no placement meets the limits", *best, *missing])


def list_schemes(
    model: FleetModel,
    offers: Sequence[Offer],
    settings: FleetSettings,
    *,
    required: int = 1,
    waited_s: float = 0.0,
    hops: Hops | None = None,
) -> Iterator[Scheme]:
    """Yield the best placement for each group size and number of full workers that fits, in order of preference."""
    for ranks in list_group_sizes(required, settings.most_ranks):
        if ranks in model.unavailable:
            continue
        ordered = _order_offers(model, offers, ranks)
        # After consolidation, only the workers with memory for the full model remain.
        least = max(1, min(ranks, required)) if settings.consolidate or ranks == 1 else 0
        for full in range(least, ranks + 1):
            if (found := _build_scheme(model, ordered, ranks, full, waited_s, hops)) is not None:
                yield found


Timed = tuple[float, int, float, str, Offer]
"""An offer, after its term_x and the values that decide between equal terms: free memory, negative bandwidth and name."""


def _order_offers(model: FleetModel, offers: Sequence[Offer], ranks: int) -> list[Timed]:
    """Return the servers that can hold a rank, sorted by term_x. Among equals, the fullest comes first."""
    size = max(model.ranks(ranks))
    least = model.part(ranks) if ranks > 1 else model.memory
    costs = model.costs
    return sorted(
        (
            predict_loaded_s(costs, size, offer.fetch_bytes_per_s, offer.load_bytes_per_s),
            offer.free,
            -offer.fetch_bytes_per_s,
            offer.server,
            offer,
        )
        for offer in offers
        if offer.free >= least
    )


def _build_scheme(
    model: FleetModel,
    ordered: list[Timed],
    ranks: int,
    full: int,
    waited_s: float,
    hops: Hops | None,
) -> Scheme | None:
    if len(ordered) < ranks:
        return None
    memory = model.full_memory(ranks)
    whole = list(islice((one for one in ordered if one[1] >= memory), full))
    if len(whole) < full:
        return None
    parts = list(islice((one for one in ordered if one not in whole), ranks - full))
    term = max(one[0] for one in (*whole, *parts))
    memories = {True: memory, False: model.part(ranks)}
    chosen = [(one[-1], True) for one in whole] + [(one[-1], False) for one in parts]
    places = _assign_ranks(model.ranks(ranks), memories, chosen)
    costs = model.group_costs(ranks)
    if hops and ranks > 1:
        costs = replace(costs, hop_s=_compute_mean_hop_s(places, hops, costs.hop_s))
    ttft = predict_ttft_s(costs, term, ranks, full, waited_s)
    tpot = predict_tpot_s(costs, ranks, full)
    return Scheme(places, term, ttft, tpot, ttft <= model.ttft_s and tpot <= model.tpot_s)


def _compute_mean_hop_s(places: Sequence[Place], hops: Hops, assumed_s: float) -> float:
    """Return t_n of a pipeline: the mean of its hops, also that back to rank 0. A hop not in `hops` takes `assumed_s`."""
    servers = [place.server for place in places]
    pairs = zip(servers, servers[1:] + servers[:1], strict=True)
    return sum(hops.get((min(pair), max(pair)), assumed_s) for pair in pairs) / len(servers)


def _assign_ranks(
    parts: Sequence[int], memory: dict[bool, int], chosen: list[tuple[Offer, bool]]
) -> tuple[Place, ...]:
    """Assign the largest rank to the fastest link. Among equals, full workers come first, because rank 0 remains."""
    count = range(len(chosen))
    quickest = sorted(chosen, key=lambda one: (-one[0].fetch_bytes_per_s, not one[1]))
    largest = sorted(count, key=lambda rank: (-parts[rank], rank))
    dealt = dict(zip(largest, quickest, strict=True))
    places = ((parts[rank], *dealt[rank]) for rank in count)
    return tuple(Place(offer.server, size, memory[full], full) for size, offer, full in places)
