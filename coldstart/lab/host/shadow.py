"""A cache of metadata alone: which models a policy would hold, and what its misses would have cost.

Invariant: the resident models hold at most `capacity` bytes; loads take no time and nobody is in use.
"""

from __future__ import annotations

from coldstart.host.policies.protocol import Costs, Policy


class ShadowCache:
    """Feed it every request. `cost_s` sums the penalties of misses, `hits` and `requests` count."""

    def __init__(self, policy: Policy, costs: Costs, capacity: int) -> None:
        self.policy, self.costs, self.capacity = policy, costs, capacity
        self.resident: set[str] = set()
        self.used = self.requests = self.hits = 0
        self.cost_s = 0.0

    def request(self, model: str, now: float) -> float:
        """Serve one request; the seconds that it lost, 0 on a hit. A model above the capacity never stays."""
        resident = model in self.resident
        self.requests += 1
        self.hits += resident
        self.policy.requested(model, now, resident)
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
            for victim in self.policy.victims(self.resident, need, now):
                self._evict(victim, now)
        self.resident.add(model)
        self.used += size
        self.policy.loaded(model, now)

    def _evict(self, model: str, now: float) -> None:
        self.resident.remove(model)
        self.used -= self.costs[model].memory
        self.policy.evicted(model, now)
