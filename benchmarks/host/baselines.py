"""Caches for comparison with the host's policies: SRRIP as a policy, LFU and ARC of libCacheSim.

SRRIP: Jaleel et al., ISCA 2010, hit priority.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from coldstart.host.policies import POLICIES
from coldstart.host.policies.protocol import Costs, Policy, take_first


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
    """SRRIP policy: evicts the model with the most distant predicted use.

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
