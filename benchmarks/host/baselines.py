"""Caches for comparison: GDSF and SRRIP as policies, LFU and ARC of libCacheSim.

GDSF (Cherkasova 1998; FaasCache uses it for warm functions) has the miss penalty as cost: H = L + F * P / S. F counts the
uses since the load; L is the H of the last victim and ages the others. libCacheSim's has no penalty.
SRRIP: Jaleel et al., ISCA 2010, hit priority.

As a program the module is `coldstart` with GDSF as a policy of the host: python -m benchmarks.host.baselines host ...
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from coldstart.host.policies import POLICIES
from coldstart.host.policies.protocol import Costs, Policy, take_first


class ShadowCache:
    """Cache of metadata that must receive every request: loads take no time, and no model is in use.

    `cost_s` sums the penalties of misses in seconds; `hits` and `requests` count.
    """

    def __init__(self, policy: Policy, costs: Costs, capacity: int) -> None:
        self.policy, self.costs, self.capacity = policy, costs, capacity
        self.resident: set[str] = set()
        self.used = self.requests = self.hits = 0
        self.cost_s = 0.0

    def request(self, model: str, now: float) -> float:
        """Process one request; return the seconds lost, 0 on a hit. A model above the capacity is never retained."""
        resident = model in self.resident
        self.requests += 1
        self.hits += resident
        self.policy.record_request(model, now, resident)
        if resident:
            return 0.0
        self.cost_s += self.costs[model].penalty_s
        self._load(model, now)
        return self.costs[model].penalty_s

    def _load(self, model: str, now: float) -> None:
        size = self.costs[model].memory
        if size > self.capacity:
            return
        if (need := self.used + size - self.capacity) > 0:
            for victim in self.policy.choose_victims(self.resident, need, now):
                self._evict(victim, now)
        self.resident.add(model)
        self.used += size
        self.policy.record_load(model, now)

    def _evict(self, model: str, now: float) -> None:
        self.resident.remove(model)
        self.used -= self.costs[model].memory
        self.policy.record_eviction(model, now)


class GDSF:
    """GDSF policy: evicts the model with the smallest H; of equals the least recently used."""

    def __init__(self, costs: Costs, capacity: int) -> None:
        self.costs, self._clock = costs, 0.0
        self._uses: dict[str, int] = {}
        self._value: dict[str, float] = {}

    def record_request(self, model: str, now: float, resident: bool) -> None:
        if resident:
            self._touch(model)

    def record_load(self, model: str, now: float) -> None:
        self._touch(model)

    def _touch(self, model: str) -> None:
        self._uses[model] = self._uses.get(model, 0) + 1
        # Reinsert: the order of the dictionary decides among equals.
        self._value.pop(model, None)
        self._value[model] = self._clock + self._uses[model] * self.costs[model].density

    def record_eviction(self, model: str, now: float) -> None:
        self._clock = max(self._clock, self._value.pop(model, 0.0))
        self._uses.pop(model, None)

    def choose_victims(self, free: Collection[str], need: int, now: float) -> Sequence[str]:
        members = set(free)
        order = sorted((m for m in self._value if m in members), key=self._value.__getitem__)
        return take_first(order, need, self.costs)


class SRRIP:
    """SRRIP policy: evicts the model with the most distant predicted use.

    Predictions have two bits: 0 on a hit, the maximum minus one on a load.
    """

    def __init__(self, costs: Costs, capacity: int) -> None:
        self.costs, self._last = costs, 3
        self._prediction: dict[str, int] = {}

    def record_request(self, model: str, now: float, resident: bool) -> None:
        if resident:
            self._prediction[model] = 0

    def record_load(self, model: str, now: float) -> None:
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
    """Cache of libCacheSim with the members of ShadowCache that the figures read.

    Sizes are in thousandths of the capacity, because its ARC moves the target by single units.
    """

    def __init__(self, name: str, costs: Costs, capacity: int) -> None:
        import libcachesim

        self._request = libcachesim.Request()
        self._cache = getattr(libcachesim, name.upper())(cache_size=1000, hashpower=12)
        self._numbers = {model: number for number, model in enumerate(costs)}
        self._sizes = {model: max(1, round(1000 * cost.memory / capacity)) for model, cost in costs.items()}
        self.costs, self.requests, self.hits, self.cost_s = costs, 0, 0, 0.0

    def request(self, model: str, now: float) -> float:
        """Process one request; return the seconds lost, 0 on a hit."""
        self._request.obj_id, self._request.obj_size = self._numbers[model], self._sizes[model]
        self._request.clock_time = self.requests
        hit = self._cache.get(self._request)
        lost = 0.0 if hit else self.costs[model].penalty_s
        self.requests, self.hits, self.cost_s = self.requests + 1, self.hits + hit, self.cost_s + lost
        return lost


LIBRARY = ("lfu", "arc")
OWN = {**POLICIES, "gdsf": GDSF, "srrip": SRRIP}
NAMES = ("lru", *LIBRARY, "srrip", "gdsf", "iam", "predictive")


def cache(name: str, costs: Costs, capacity: int) -> ShadowCache | LibCache:
    """Return an empty cache of `capacity` bytes under one of `NAMES`."""
    if name in LIBRARY:
        return LibCache(name, costs, capacity)
    return ShadowCache(OWN[name](costs, capacity), costs, capacity)


def main() -> None:
    """Run `coldstart` with GDSF among the host's policies."""
    from coldstart.commands import cli

    POLICIES["gdsf"] = GDSF
    cli.main()


if __name__ == "__main__":
    main()
