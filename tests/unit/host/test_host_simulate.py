"""The simulated host: replays with hand-computed times, and a comparison with the untimed cache."""

from __future__ import annotations

import math
from random import Random

import pytest

from benchmarks.host.baselines import ShadowCache
from coldstart.host.core import Core
from coldstart.host.events import ModelReady, RequestArrived, RequestEnded, ServerOutdated, TierChanged
from coldstart.host.policies import POLICIES, ModelCost
from coldstart.host.specification import HostSettings, ModelSpec
from coldstart.lab.host import simulate
from coldstart.lab.records import ModelRequest

A, B = ModelSpec.with_two_tiers("a", 10, 5.0), ModelSpec.with_two_tiers("b", 10, 7.0)


def _settings(**given: object) -> HostSettings:
    return HostSettings(**{"memory": 15, "policy": "lru", "max_held": 10**6, "hold_s": math.inf, **given})  # type: ignore[arg-type]


def test_one_swap_by_hand() -> None:
    """a starts from 0 to 5 and serves to 7; b arrives at 1 and waits, evictions take 1 s: b serves from 15."""
    asked = [ModelRequest(0.0, "a", 2.0), ModelRequest(1.0, "b", 2.0), ModelRequest(30.0, "b", 2.0)]
    done = simulate(asked, [A, B], _settings(), leave_s=1.0)
    assert [(one.sent_s, one.cold) for one in done.records] == [(5.0, True), (15.0, True), (30.0, False)]
    assert [done.counts[name] for name in ("starts", "departures", "start_s", "peak_memory_bytes")] == [
        2,
        1,
        12.0,
        10,
    ]
    assert done.duration_s == 32.0


def test_a_busy_model_is_made_to_drain_after_the_patience() -> None:
    asked = [ModelRequest(float(t), "a", 3.0) for t in range(0, 100, 2)] + [ModelRequest(100.0, "a", 3.0)]
    asked = sorted([*asked, ModelRequest(11.0, "b", 1.0)], key=lambda one: one.arrival_s)
    done = simulate(asked, [A, B], _settings(patience_s=20.0))
    (b,) = (one for one in done.records if one.model == "b")
    assert 31.0 + 7.0 <= (b.sent_s or 0.0) <= 31.0 + 3.0 + 7.0
    assert all(one.ok for one in done.records)


def test_a_start_past_its_deadline_answers_its_requests() -> None:
    done = simulate([ModelRequest(0.0, "a", 1.0)], [A], _settings(ready_timeout_s=2.0))
    assert [one.error for one in done.records] == [
        "HTTP 503: model a did not start: the start exceeded its deadline"
    ]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_distant_requests_give_the_results_of_the_untimed_cache(policy: str) -> None:
    """No request overlaps a start or another request: starts and hits follow from the metadata alone."""
    random = Random(7)
    costs = {f"m{i}": ModelCost(random.randint(5, 40), random.uniform(1, 30)) for i in range(12)}
    asked = [(200.0 * t + random.uniform(0, 100), random.choice(list(costs))) for t in range(400)]
    capacity = 120
    cache = ShadowCache(POLICIES[policy](costs, capacity), costs, capacity)
    for time, model in asked:
        cache.request(model, time)
    specs = [ModelSpec.with_two_tiers(name, cost.memory, cost.penalty_s) for name, cost in costs.items()]
    done = simulate(
        [ModelRequest(t, m, 0.5) for t, m in asked], specs, _settings(memory=capacity, policy=policy)
    )
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
