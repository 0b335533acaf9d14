"""LRU against libCacheSim's, on requests of skewed popularity for objects of unequal size."""

from __future__ import annotations

import math
from importlib.util import find_spec
from random import Random

import pytest

from benchmarks.host.baselines import ShadowCache
from coldstart.host.policies import ModelCost
from coldstart.host.policies.lru import LRU

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


def _theirs(sizes: list[int], asked: list[int], capacity: int) -> float:
    import libcachesim

    cache = libcachesim.LRU(cache_size=capacity, hashpower=12)
    hits = 0
    for number, item in enumerate(asked):
        request = libcachesim.Request()
        request.obj_id, request.obj_size, request.clock_time = item, sizes[item], number
        hits += cache.get(request)
    return hits / len(asked)


def _ours(sizes: list[int], asked: list[int], capacity: int) -> float:
    # One penalty for all, because the reference knows sizes only.
    costs = {str(item): ModelCost(size, 1.0) for item, size in enumerate(sizes)}
    cache = ShadowCache(LRU(costs, capacity), costs, capacity)
    for number, item in enumerate(asked):
        cache.request(str(item), float(number))
    return cache.hits / cache.requests


@pytest.mark.parametrize("drift", [False, True])
@pytest.mark.parametrize("share", [0.2, 0.4, 0.8])
def test_hit_ratio_equals_the_reference(share: float, drift: bool) -> None:
    for seed in range(3):
        sizes, asked = _load(seed, drift)
        capacity = max(round(share * sum(sizes)), *sizes)
        assert _ours(sizes, asked, capacity) == _theirs(sizes, asked, capacity)
