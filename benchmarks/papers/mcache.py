"""mCache's figures 6 to 10 and table 3, on the bare cache with the host's policies.

docs/explanation/mcache.md describes the trace, the models and the constants E and SPREAD. Most baselines are
libCacheSim's, which has wheels for x86-64 and Python up to 3.13.

Run: python -m benchmarks papers/mcache [NUMBER...], or papers/mcache-NUMBER
Time: ten seconds for all
Result: papers/mcache-table3.json and one for each other figure
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from functools import cache as once
from itertools import chain
from math import exp
from random import Random
from statistics import fmean

from benchmarks.papers import Found, Rows, declare, run
from coldstart.host.policies import POLICIES, ModelCost
from coldstart.host.policies.protocol import Costs, Policy, take_first

SIZES_GB = {
    "ResNet50": 0.10,
    "SSD": 0.27,
    "BERT": 1.34,
    "RoBERTa": 1.42,
    "XLNet": 1.44,
    "T5": 2.95,
    "GPT-2": 3.1,
}
COSTS = {name: ModelCost(round(size * 10**9), 1.0 + size / 0.1) for name, size in SIZES_GB.items()}
SLOWEST = sorted(COSTS, key=lambda name: -COSTS[name].penalty_s)
SEEDS, WORKLOADS, SHARES = range(6), ("random", "round-robin", "quantile", "quantile-r"), (0.2, 0.4, 0.6, 0.8)
WINDOW_S, WINDOWS, SERVICES, REQUESTS, SPREAD = 600.0, 6, 108, 2389, 1.5
E_S = (4.38 - 2.39 * 1.68) / (2.39 - 1)
PAPER3 = {
    0.4: (8.20, 6.93, 6.36, 6.32, 5.96),
    0.6: (7.35, 5.48, 4.89, 4.74, 4.21),
    0.8: (4.38, 2.57, 2.23, 2.01, 1.68),
}
BASELINES = ("lfu", "lru", "arc", "srrip")
COMPARED = (*BASELINES, "iam", "predictive")
Arrivals = list[tuple[float, str]]
"""Time in seconds and model of each request."""


class ShadowCache:
    """Cache of metadata that must receive every request: loads take no time, and no model is in use.

    `cost_s` sums the penalties of misses in seconds; `hits` counts.
    """

    def __init__(self, policy: Policy, costs: Costs, capacity: int) -> None:
        self.policy, self.costs, self.capacity = policy, costs, capacity
        self.resident: set[str] = set()
        self.used = self.hits = 0
        self.cost_s = 0.0

    def request(self, model: str, now: float) -> float:
        """Process one request; return the seconds lost, 0 on a hit. A model above the capacity is never retained."""
        resident, cost = model in self.resident, self.costs[model]
        self.hits += resident
        self.policy.record_request(model, now, resident)
        if resident:
            return 0.0
        self.cost_s += cost.penalty_s
        if cost.memory <= self.capacity:
            need = self.used + cost.memory - self.capacity
            for victim in self.policy.choose_victims(self.resident, need, now) if need > 0 else ():
                self.resident.remove(victim)
                self.used -= self.costs[victim].memory
                self.policy.record_eviction(victim, now)
            self.resident.add(model)
            self.used += cost.memory
            self.policy.record_load_start(model, now)
        return cost.penalty_s


class SRRIP:
    """SRRIP policy (Jaleel et al., ISCA 2010, hit priority): evicts the model with the most distant predicted use.

    Predictions have two bits: 0 on a hit, the maximum minus one on a load.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs, self._last = costs, 3
        self._prediction: dict[str, int] = {}

    def record_request(self, model: str, now: float, resident: bool) -> None:
        if resident:
            self._prediction[model] = 0

    def record_load_start(self, model: str, now: float) -> None:
        self._prediction[model] = self._last - 1

    def record_eviction(self, model: str, now: float) -> None:
        """Age all other models as far as the victim had to age to be evicted."""
        aged = self._last - self._prediction.pop(model, self._last)
        if aged:
            for other, value in self._prediction.items():
                self._prediction[other] = min(self._last, value + aged)

    def choose_victims(self, free: Collection[str], need: int, now: float) -> Sequence[str]:
        members = set(free)
        order = sorted((m for m in self._prediction if m in members), key=lambda m: -self._prediction[m])
        return take_first(order, need, self.costs)


class LibCache:
    """Cache of libCacheSim.

    Sizes are in thousandths of the capacity, because its ARC moves the target by single units.
    """

    def __init__(self, name: str, costs: Costs, capacity: int) -> None:
        import libcachesim

        self._request = libcachesim.Request()
        self._cache = getattr(libcachesim, name.upper())(cache_size=1000, hashpower=12)
        self._numbers = {model: number for number, model in enumerate(costs)}
        self._sizes = {model: max(1, round(1000 * cost.memory / capacity)) for model, cost in costs.items()}
        self.costs = costs

    def request(self, model: str, now: float) -> float:
        """Process one request; return the seconds lost, 0 on a hit."""
        self._request.obj_id, self._request.obj_size = self._numbers[model], self._sizes[model]
        self._request.clock_time += 1
        return 0.0 if self._cache.get(self._request) else self.costs[model].penalty_s


def cache(name: str, costs: Costs, capacity: int) -> ShadowCache | LibCache:
    """Return an empty cache of `capacity` bytes: "lfu", "arc", "srrip" or a policy of the host."""
    if name in ("lfu", "arc"):
        return LibCache(name, costs, capacity)
    policy = {**POLICIES, "srrip": SRRIP}[name]
    return ShadowCache(policy(costs), costs, capacity)


def arrivals(kind: str, seed: int) -> Arrivals:
    """Return an hour of requests to services in ascending popularity, each bound to a model in one of the four ways of
    section 6.1: "quantile" gives models with high loading time to services with high popularity, "quantile-r" the reverse.
    """
    random = Random(f"{kind}/{seed}")
    popularity = sorted(random.lognormvariate(0, 2.3) for _ in range(SERVICES * 10 // 9))[:SERVICES]
    place: Callable[[int], int] = {
        "random": lambda i: random.randrange(7),
        "round-robin": lambda i: i % 7,
        "quantile": lambda i: 6 - i * 7 // SERVICES,
        "quantile-r": lambda i: i * 7 // SERVICES,
    }[kind]
    models = [SLOWEST[place(i)] for i in range(SERVICES)]
    weights = [[p * exp(random.gauss(0, SPREAD)) for p in popularity] for _ in range(WINDOWS)]
    total, found = sum(map(sum, weights)), Arrivals()
    for window, row in enumerate(weights):
        shares = (REQUESTS * weight / total for weight in row)
        counts = [int(share) + (random.random() < share % 1) for share in shares]
        invoked = [model for model, count in zip(models, counts, strict=True) for _ in range(count)]
        random.shuffle(invoked)
        gap = WINDOW_S / max(1, len(invoked))
        found += [(window * WINDOW_S + i * gap, model) for i, model in enumerate(invoked)]
    return found


@once
def loads(kind: str, share: float, policy: str) -> list[list[float]]:
    """Return for each seed the loading time of each request in seconds, 0 on a hit."""
    sizes, found = [cost.memory for cost in COSTS.values()], []
    for seed in SEEDS:
        replayed = cache(policy, COSTS, max(round(share * sum(sizes)), *sizes))
        found.append([replayed.request(model, now) for now, model in arrivals(kind, seed)])
    return found


def mean(kind: str, share: float, policy: str = "iam") -> float:
    return fmean(map(fmean, loads(kind, share, policy)))


def figure6() -> Found:
    """Mean latency of IAM by workload and memory."""
    ours = {kind: [round(mean(kind, share) + E_S, 2) for share in SHARES] for kind in WORKLOADS}
    at_60 = {kind: seconds[2] for kind, seconds in ours.items()}
    rows: Rows = [
        ("workload of the highest latency at 60 %", "random", max(at_60, key=at_60.__getitem__)),
        ("workload of the lowest latency at 60 %", "quantile", min(at_60, key=at_60.__getitem__)),
    ]
    for kind, seconds in ours.items():
        shown = f"{', '.join(map(str, seconds))} s"
        rows.append((f"mean latency, {kind}, 20, 40, 60, 80 %", "(picture)", shown))
    return rows, {"seconds": ours}


def figure7() -> Found:
    """Share of loading in the latency, workload quantile."""
    rows: Rows = []
    for share, paper in ((0.2, "98 %"), (0.8, "8 %")):
        load_s = mean("quantile", share)
        shown = f"{100 * load_s / (load_s + E_S):.0f} %"
        rows.append((f"loading in the latency, {share:.0%} of the memory", paper, shown))
    return rows, {"execution_s": E_S}


def figure8() -> Found:
    """90th percentile of the loading time over all workloads."""
    rows: Rows = []
    for share, paper in ((0.4, "below 10 s"), (0.8, "below 3 s")):
        pooled = [sorted(chain.from_iterable(loads(kind, share, "iam"))) for kind in WORKLOADS]
        worst = max(one[int(0.9 * len(one))] for one in pooled)
        what = f"90th percentile of the loading time, {share:.0%}, worst workload"
        rows.append((what, paper, f"{worst:.1f} s"))
    return rows, {}


def figure9() -> Found:
    """Hit ratio, workload random."""
    rows, details = Rows(), {}
    for share in SHARES:
        hits = {
            name: fmean(fmean(lost == 0 for lost in one) for one in loads("random", share, name))
            for name in COMPARED
        }
        paper = "about 1.5" if share == 0.4 else "above 1"
        ours = hits["iam"] / max(hits[name] for name in BASELINES)
        rows.append((f"hit ratio of IAM over the best other, {share:.0%}", paper, f"{ours:.2f}"))
        details[str(share)] = hits
    return rows, {"hit_ratio": details}


def figure10() -> Found:
    """Throughput over LFU, workload random, requests one after the other."""
    rows: Rows = []
    for share, paper in ((0.4, "1.5x"), (0.8, "2.39x")):
        lfu = mean("random", share, "lfu") + E_S
        for name, theirs in (("iam", paper), ("predictive", "-")):
            shown = f"{lfu / (mean('random', share, name) + E_S):.2f}x"
            rows.append((f"throughput of {name} over LFU, {share:.0%}", theirs, shown))
    return rows, {"execution_s": E_S}


def table3() -> Found:
    """Mean loading time, workload random, and the gain over LFU."""
    rows: Rows = []
    for share, row in PAPER3.items():
        papers = [f"{paper:.2f} s ({1 - paper / row[0]:.0%} less than LFU)" for paper in row]
        lfu = mean("random", share, "lfu")
        for name, paper in zip(COMPARED, (*papers, "-"), strict=True):
            ours = mean("random", share, name)
            rows.append((f"{name}, {share:.0%}", paper, f"{ours:.2f} s ({1 - ours / lfu:.0%})"))
    return rows, {"spread": SPREAD, "seeds": len(SEEDS)}


EXPERIMENTS = declare(figure6, figure7, figure8, figure9, figure10, table3)

if __name__ == "__main__":
    run("mcache", EXPERIMENTS, sys.argv[1:])
