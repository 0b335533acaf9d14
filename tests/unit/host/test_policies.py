"""Eviction policies on hand-made examples: victims and remembered state."""

import math
from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.examples import examples

from benchmarks.papers.mcache import ShadowCache
from coldstart.host.core import Core
from coldstart.host.events import ModelReady, RequestArrived, RequestEnded, ServerOutdated, TierChanged
from coldstart.host.policies import POLICIES, ModelCost, Policy
from coldstart.host.policies.iam import REBUILD_S, UPDATE_S, ImportancePolicy
from coldstart.host.policies.predictive import PredictivePolicy, find_cheapest_victims
from coldstart.host.specification import HostSettings, ModelSpec
from coldstart.lab.host import simulate
from coldstart.lab.records import SimulatedRequest


def test_iam_evicts_by_the_queue_until_its_shadow_is_ready() -> None:
    costs = {"often": ModelCost(1, 1.0), "rare": ModelCost(1, 1.0)}
    policy = ImportancePolicy(costs)
    for model in costs:
        policy.record_request(model, 0.0, False)
        policy.record_load_start(model, 0.0)
    for second in range(1, 8):
        policy.record_request("often", float(second), True)
    assert policy.choose_victims(costs, 1, 8.0) == ["often"], "the ranks are those of the load"
    start = REBUILD_S + UPDATE_S
    policy.record_request("often", start, True)
    assert policy.choose_victims(costs, 1, start + REBUILD_S / 2) == ["often"], "the shadow is not ready"
    policy.record_request("often", start + REBUILD_S, True)
    assert policy.choose_victims(costs, 1, start + REBUILD_S) == ["rare"]


def test_iam_takes_a_model_loaded_during_a_rebuild_last() -> None:
    costs = {"queued": ModelCost(1, 9.0), "late": ModelCost(1, 1.0)}
    policy = ImportancePolicy(costs)
    policy.record_request("queued", 0.0, False)
    policy.record_load_start("queued", 0.0)
    policy.record_request("queued", REBUILD_S, True)
    policy.record_request("queued", REBUILD_S + UPDATE_S, True)
    policy.record_load_start("late", REBUILD_S + UPDATE_S)
    assert policy.choose_victims(costs, 1, 12.0) == ["queued"]
    assert policy.choose_victims(costs, 2, 12.0) == ["queued", "late"]


def test_iam_ranks_a_model_at_its_request_before_the_evictions_for_it() -> None:
    """Algorithm 1, lines 3 and 18: the evicted model counts in the rank of the model that it makes room for."""
    costs = {"low": ModelCost(1, 1.0), "same": ModelCost(1, 2.0), "new": ModelCost(1, 2.0)}
    policy = ImportancePolicy(costs)
    for model in ("same", "low"):
        policy.record_request(model, 0.0, False)
        policy.record_load_start(model, 0.0)
    policy.record_request("new", 0.0, False)
    policy.record_eviction("low", 0.0)
    policy.record_load_start("new", 0.0)
    assert policy.choose_victims(["same", "new"], 1, 0.0) == ["same"]


def test_iam_order_is_that_of_equation_1() -> None:
    costs = {"dear": ModelCost(1, 9.0), "cheap": ModelCost(1, 1.0), "large": ModelCost(30, 9.0)}
    policy = ImportancePolicy(costs)
    for time in range(0, 200, 10):
        for model in costs:
            policy.record_request(model, float(time), time > 0)
            if time == 0:
                policy.record_load_start(model, 0.0)
    policy.record_request("dear", 400.0, True)
    policy.record_request("dear", 402.0, True)
    assert policy.choose_victims(costs, 32, 402.0) == ["large", "cheap", "dear"]


def test_predictive_retains_models_requested_soon() -> None:
    costs = {name: ModelCost(10, 5.0) for name in ("steady", "gone")}
    policy = PredictivePolicy(costs)
    for time in range(100):
        policy.record_request("gone", time * 1.0, True)
    for time in range(40):
        policy.record_request("steady", 100 + time * 20.0, True)
    assert policy.choose_victims(costs, 10, 900.0) == ["gone"]


@pytest.mark.parametrize("seed", range(3))
def test_predictive_loses_less_than_lru_where_popularity_drifts(seed: int) -> None:
    random = Random(seed)
    costs = {f"m{i}": ModelCost(random.randint(1, 30), random.uniform(1, 30)) for i in range(20)}
    capacity = sum(cost.memory for cost in costs.values()) * 2 // 5
    caches = {name: ShadowCache(POLICIES[name](costs), costs, capacity) for name in ("predictive", "lru")}
    order, weights = list(costs), [1 / (rank + 1) for rank in range(20)]
    for number in range(4000):
        if number % 400 == 0:
            random.shuffle(order)
        model = random.choices(order, weights)[0]
        for cache in caches.values():
            cache.request(model, float(number))
    assert caches["predictive"].cost_s < 0.75 * caches["lru"].cost_s


@pytest.mark.parametrize("seed", range(20))
def test_victims_are_near_the_cheapest_set(seed: int) -> None:
    random = Random(seed)
    items = [(random.lognormvariate(0, 1), random.randint(1, 40), f"m{i}") for i in range(9)]
    need = random.randint(1, sum(size for _, size, _ in items))
    chosen = set(find_cheapest_victims(items, need, 0.0))
    loss = sum(density * size for density, size, name in items if name in chosen)
    sets = (s for count in range(1, 10) for s in combinations(items, count))
    best = min(sum(d * z for d, z, _ in s) for s in sets if sum(z for _, z, _ in s) >= need)
    assert sum(size for _, size, name in items if name in chosen) >= need
    assert best - 1e-9 <= loss <= 1.5 * best


MODELS = [f"m{i}" for i in range(8)]
Steps = list[tuple[int, float, list[bool]]]
steps = st.lists(
    st.tuples(st.integers(0, 7), st.floats(0, 500), st.lists(st.booleans(), min_size=8, max_size=8)),
    max_size=60,
)
sizes = st.lists(st.integers(1, 60), min_size=8, max_size=8)
penalties = st.lists(st.floats(0.01, 100), min_size=8, max_size=8)


def _checked(
    policy: Policy, free: list[str], need: int, now: float, costs: dict[str, ModelCost]
) -> list[str]:
    chosen = list(policy.choose_victims(free, need, now))
    assert set(chosen) <= set(free) and len(set(chosen)) == len(chosen)
    held = sum(costs[model].memory for model in chosen)
    assert held >= min(need, sum(costs[model].memory for model in free))
    assert policy.choose_victims(free, need, now) == chosen
    return chosen


@pytest.mark.parametrize("name", POLICIES)
@examples(60)
@given(trace=steps, size=sizes, penalty=penalties)
def test_victims_suffice_and_are_free(name: str, trace: Steps, size: list[int], penalty: list[float]) -> None:
    costs = {m: ModelCost(s, p) for m, s, p in zip(MODELS, size, penalty, strict=True)}
    capacity = max(60, sum(size) // 2)
    policy, resident, now = POLICIES[name](costs), list[str](), 0.0
    for number, gap, busy in trace:
        model, now = MODELS[number], now + gap
        policy.record_request(model, now, model in resident)
        if model in resident:
            continue
        free = [m for i, m in enumerate(MODELS) if m in resident and not busy[i]]
        need = sum(costs[m].memory for m in [*resident, model]) - capacity
        victims = _checked(policy, free, need, now, costs) if need > 0 else []
        if need > sum(costs[m].memory for m in victims):
            continue
        for victim in victims:
            resident.remove(victim)
            policy.record_eviction(victim, now)
        resident.append(model)
        policy.record_load_start(model, now)


A, B = ModelSpec.with_two_tiers("a", 10, 5.0), ModelSpec.with_two_tiers("b", 10, 7.0)


def _settings(**given: object) -> HostSettings:
    return HostSettings(**{"memory": 15, "policy": "lru", "max_held": 10**6, "hold_s": math.inf, **given})  # type: ignore[arg-type]


def test_one_swap_by_hand() -> None:
    """a starts from 0 to 5 and serves to 7; b arrives at 1 and waits for its eviction: b serves from 14."""
    asked = [SimulatedRequest(at, model, 2.0) for at, model in ((0.0, "a"), (1.0, "b"), (30.0, "b"))]
    done = simulate(asked, [A, B], _settings())
    assert [(one.sent_s, one.cold) for one in done.records] == [(5.0, True), (14.0, True), (30.0, False)]
    counts = [done.counts[name] for name in ("starts", "departures", "start_s", "peak_memory_bytes")]
    assert counts == [2, 1, 12.0, 10]
    assert done.duration_s == 32.0


def test_a_busy_model_is_made_to_drain_after_the_patience() -> None:
    asked = [SimulatedRequest(float(t), "a", 3.0) for t in range(0, 101, 2)]
    asked = sorted([*asked, SimulatedRequest(11.0, "b", 1.0)], key=lambda one: one.arrival_s)
    done = simulate(asked, [A, B], _settings(patience_s=20.0))
    (b,) = (one for one in done.records if one.model == "b")
    assert 31.0 + 7.0 <= (b.sent_s or 0.0) <= 31.0 + 3.0 + 7.0
    assert all(one.ok for one in done.records)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_distant_requests_give_the_results_of_the_untimed_cache(policy: str) -> None:
    """No request overlaps a start or another request: starts and hits follow from the metadata alone."""
    random = Random(7)
    costs = {f"m{i}": ModelCost(random.randint(5, 40), random.uniform(1, 30)) for i in range(12)}
    asked = [(200.0 * t + random.uniform(0, 100), random.choice(list(costs))) for t in range(400)]
    capacity = 120
    cache = ShadowCache(POLICIES[policy](costs), costs, capacity)
    for time, model in asked:
        cache.request(model, time)
    specs = [ModelSpec.with_two_tiers(name, cost.memory, cost.penalty_s) for name, cost in costs.items()]
    requests = [SimulatedRequest(t, m, 0.5) for t, m in asked]
    done = simulate(requests, specs, _settings(memory=capacity, policy=policy))
    assert sum(not one.cold for one in done.records) == cache.hits
    assert done.counts["start_s"] == pytest.approx(cache.cost_s)


def test_the_first_start_of_a_model_replaces_its_estimate() -> None:
    """A bundle's start may import vLLM and take 20 s where the host's forked one takes 1 s."""
    core = Core([ModelSpec.with_two_tiers("a", 10, 20.0)], _settings())
    for request, (seconds, known) in enumerate(((1.0, 1.0), (4.0, 2.0))):
        now = 100.0 * request
        core.handle(RequestArrived(str(request), "a"), now)
        core.handle(ModelReady("a", seconds), now + seconds)
        core.handle(RequestEnded(str(request)), now + 10)
        model = core.models["a"]
        assert model.observed.penalty_s(model.spec.tiers[-1]) == known
        core.handle(ServerOutdated("a"), now + 20)
        core.handle(TierChanged("a"), now + 21)
