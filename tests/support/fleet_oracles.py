"""Reference results for fleet policies: exhaustive choice of servers, and exact sharing of a link."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations, pairwise
from math import ceil, inf
from random import Random

from coldstart.fleet.reservations import BandwidthReservations
from coldstart.fleet.sizing import Offer
from coldstart.fleet.specification import Costs, FleetModel, FleetSettings, Overlap

GIB = 1 << 30


def cluster(random: Random) -> tuple[FleetModel, list[Offer], FleetSettings, int, float]:
    """Return a model, up to seven unequal servers, settings, required workers, and how long a request has waited."""
    size = random.randint(1, 30) * GIB
    memory = size + random.randint(0, 6) * GIB
    runtime = [random.uniform(0, 4) for _ in range(3)]
    own = random.uniform(0, 0.2), random.uniform(0, 0.02), random.uniform(0, 3), random.uniform(0.01, 0.1)
    costs = Costs(*runtime, *own, random.choice(list(Overlap)))
    limit = random.choice([inf, random.uniform(1, 25)])
    pace = random.choice([inf, own[3] * random.uniform(0.9, 4.5)])
    waited = random.choice([0.0, random.uniform(0, 5)])
    shares = {}
    if random.random() < 0.5:
        for ranks in range(1, 5):
            cuts = sorted(random.sample(range(1, 1000), ranks - 1))
            edges = [0, *(size * cut // 1000 for cut in cuts), size]
            shares[ranks] = tuple(b - a for a, b in pairwise(edges))
    twice = random.choice([0.0, 0.3, 1.0])
    model = FleetModel("m", size, memory, costs, limit, pace, shares=shares, held_twice=twice)
    offers = [
        Offer(
            f"s{number}",
            random.choice([0.0, random.uniform(0.2, 10) * GIB, 2.0 * GIB]),
            random.choice([random.uniform(1, 20) * GIB, 12.0 * GIB]),
            random.choice([random.randint(0, 48) * GIB, 24 * GIB, memory, memory // 2]),
        )
        for number in range(random.randint(0, 7))
    ]
    required, consolidate = random.choice([1, 1, 1, 2, 3, 4, 6]), random.random() < 0.8
    return model, offers, FleetSettings(consolidate=consolidate), required, waited


def term(model: FleetModel, offer: Offer, size: int) -> float:
    """Return the TTFT by equations 1 and 5."""
    c, fetch, load = model.costs, size / offer.fetch_bytes_per_s, size / offer.load_bytes_per_s
    if c.overlap == "sequential":
        return c.container_s + c.context_s + c.library_s + fetch + load
    return max(c.container_s + c.context_s + max(load, c.library_s), fetch)


def exhaustive(
    model: FleetModel, offers: Sequence[Offer], settings: FleetSettings, required: int, waited_s: float
) -> tuple[int, int, float, bool] | None:
    """Return (s, w, TTFT, meets) of the best set of full and other workers, or None if none fits."""
    usable = [offer for offer in offers if offer.fetch_bytes_per_s > 0]
    best: dict[tuple[int, int], float] = {}
    for s in range(1, 5):
        sizes = model.shares.get(s) or tuple(
            model.size * (r + 1) // s - model.size * r // s for r in range(s)
        )
        largest = max(sizes)
        whole = model.memory + (ceil(model.held_twice * largest) if s > 1 else 0)
        part = whole if s == 1 else max(-(-model.memory // s), largest)
        for w in range(s + 1):
            if w < (max(1, min(s, required)) if settings.consolidate or s == 1 else 0):
                continue
            for full in combinations([o for o in usable if o.free >= whole], w):
                others = [o for o in usable if o.free >= part and o not in full]
                for rest in combinations(others, s - w):
                    c, pace = model.costs, s - w + w / s
                    slowest = max(term(model, o, largest) for o in (*full, *rest))
                    ttft = waited_s + slowest + c.join_s * s + (c.prefill_s * pace + c.hop_s * s)
                    best[s, w] = min(best.get((s, w), inf), ttft)
    floor = min(max(1, required), 4)
    order = [*range(floor, 5), *range(floor - 1, 0, -1)]
    for s, w in sorted(best, key=lambda one: (order.index(one[0]), one[1])):
        if s > 1 and (1, 1) in best and best[s, w] >= best[1, 1]:
            continue
        tpot = model.costs.decode_s * (s - w + w / s) + model.costs.hop_s * s
        if best[s, w] <= model.ttft_s and tpot <= model.tpot_s:
            return s, w, best[s, w], True
    return (1, 1, best[1, 1], False) if (1, 1) in best else None


class ExactLink:
    """Link with equal shares in rational numbers: end of each fetch, and transferred bytes."""

    def __init__(self, rate: int) -> None:
        self.rate, self.now = rate, Fraction(0)
        self.left: dict[str, Fraction] = {}
        self.ended: dict[str, Fraction] = {}
        self.busy = Fraction(0)

    def advance(self, now: Fraction) -> None:
        while self.left and self.now < now:
            share = Fraction(self.rate, len(self.left))
            first = min(self.left, key=lambda name: self.left[name])
            step = min(now - self.now, self.left[first] / share)
            self.left = {name: size - share * step for name, size in self.left.items()}
            self.now, self.busy = self.now + step, self.busy + step
            for name in [name for name, size in self.left.items() if size <= 0]:
                self.ended[name] = self.now
                del self.left[name]
        self.now = max(self.now, now)

    def add(self, name: str, size: int) -> None:
        self.left[name] = Fraction(size)


def ledger_run(random: Random) -> tuple[int, int, float, float]:
    """Return admitted and refused claims, the least slack in seconds, and the relative error of the bytes."""
    rate = random.randint(1, 50) * 10**8
    reservations, exact, deadlines, now, asked = (
        BandwidthReservations(rate),
        ExactLink(rate),
        dict[str, Fraction](),
        0.0,
        0,
    )
    refused = 0
    for number in range(random.randint(1, 15)):
        now += random.choice([0.0, random.expovariate(0.3)])
        exact.advance(Fraction(now))
        size = random.randint(1, 400) * 10**8
        deadline = now + size / rate * random.uniform(0.8, 6)
        try:
            reservations.claim(str(number), size, deadline, now)
        except ValueError:
            refused += 1
            continue
        exact.add(str(number), size)
        deadlines[str(number)], asked = Fraction(deadline), asked + size
    exact.advance(Fraction(10**9))
    reservations.link.advance(1e9)
    slack = min((float(deadlines[name] - exact.ended[name]) for name in deadlines), default=inf)
    return len(deadlines), refused, slack, abs(reservations.link.moved - asked) / max(1, asked)
