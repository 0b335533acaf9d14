"""LRU, LFU, ARC and GDSF against libCacheSim's, on requests of skewed popularity for objects of unequal size."""

from __future__ import annotations

import math
from importlib.util import find_spec
from random import Random

import pytest

from coldstart.host.policies import POLICIES, ModelCost
from coldstart.lab.host.shadow import ShadowCache

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("libcachesim") is None, reason="libcachesim is not installed (the dev extra has it)"
    ),
]
OBJECTS, REQUESTS = 60, 6000


def _load(seed: int, drift: bool) -> tuple[list[int], list[int]]:
    """Return object sizes and requested objects; with drift the popularity is shuffled every thousand requests."""
    random = Random(seed)
    sizes = [max(1, round(random.lognormvariate(math.log(800), 0.9))) for _ in range(OBJECTS)]
    order, asked = list(range(OBJECTS)), list[int]()
    weights = [1 / (rank + 1) ** 0.9 for rank in range(OBJECTS)]
    for number in range(REQUESTS):
        if number % (1000 if drift else REQUESTS) == 0:
            random.shuffle(order)
        asked.append(random.choices(order, weights)[0])
    return sizes, asked


def _theirs(name: str, sizes: list[int], asked: list[int], capacity: int) -> float:
    import libcachesim

    cache = getattr(libcachesim, name)(cache_size=capacity, hashpower=12)
    hits = 0
    for number, item in enumerate(asked):
        request = libcachesim.Request()
        request.obj_id, request.obj_size, request.clock_time = item, sizes[item], number
        hits += cache.get(request)
    return hits / len(asked)


def _ours(name: str, sizes: list[int], asked: list[int], capacity: int) -> float:
    # One penalty for all, because the reference knows sizes only.
    costs = {str(item): ModelCost(size, 1.0) for item, size in enumerate(sizes)}
    cache = (_InsertFirst if name == "gdsf" else ShadowCache)(
        POLICIES[name](costs, capacity), costs, capacity
    )
    for number, item in enumerate(asked):
        cache.request(str(item), float(number))
    return cache.hits / cache.requests


class _InsertFirst(ShadowCache):
    """libCacheSim's GDSF inserts and then evicts, so that the new object may be evicted at once; a used model must not."""

    def _load(self, model: str, now: float) -> None:
        self.resident.add(model)
        self.used += self.costs[model].memory
        self.policy.loaded(model, now)
        for victim in self.policy.victims(self.resident, self.used - self.capacity, now):
            self._evict(victim, now)


@pytest.mark.parametrize("drift", [False, True])
@pytest.mark.parametrize("share", [0.2, 0.4, 0.8])
@pytest.mark.parametrize(("name", "theirs"), [("lru", "LRU"), ("lfu", "LFU"), ("gdsf", "GDSF")])
def test_hit_ratio_equals_the_reference(name: str, theirs: str, share: float, drift: bool) -> None:
    for seed in range(3):
        sizes, asked = _load(seed, drift)
        capacity = max(round(share * sum(sizes)), *sizes)
        assert _ours(name, sizes, asked, capacity) == _theirs(theirs, sizes, asked, capacity)


@pytest.mark.parametrize("share", [0.2, 0.4, 0.8])
@pytest.mark.parametrize(("equal", "points"), [(True, 0.0), (False, 4.0)])
def test_arc_is_near_the_reference(equal: bool, points: float, share: float) -> None:
    """The reference moves its target by single bytes, ours by the size of the model: equal if all sizes are one."""
    for seed in range(3):
        for drift in (False, True):
            sizes, asked = _load(seed, drift)
            sizes = [1] * OBJECTS if equal else sizes
            capacity = max(round(share * sum(sizes)), *sizes)
            gap = _ours("arc", sizes, asked, capacity) - _theirs("ARC", sizes, asked, capacity)
            assert abs(gap) * 100 <= points, f"seed {seed}: {gap * 100:.2f} points"
