"""Every policy on any sequence of requests: victims are free, unique and sufficient."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.examples import examples

from coldstart.host.policies import POLICIES, ModelCost, Policy

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
    chosen = list(policy.victims(free, need, now))
    assert set(chosen) <= set(free) and len(set(chosen)) == len(chosen)
    held = sum(costs[model].memory for model in chosen)
    assert held >= min(need, sum(costs[model].memory for model in free))
    assert policy.victims(free, need, now) == chosen
    return chosen


@pytest.mark.parametrize("name", POLICIES)
@examples(60)
@given(trace=steps, size=sizes, penalty=penalties)
def test_victims_suffice_and_are_free(name: str, trace: Steps, size: list[int], penalty: list[float]) -> None:
    costs = {m: ModelCost(s, p) for m, s, p in zip(MODELS, size, penalty, strict=True)}
    capacity = max(60, sum(size) // 2)
    policy, resident, now = POLICIES[name](costs, capacity), list[str](), 0.0
    for number, gap, busy in trace:
        model, now = MODELS[number], now + gap
        policy.requested(model, now, model in resident)
        if model in resident:
            continue
        free = [m for i, m in enumerate(MODELS) if m in resident and not busy[i]]
        need = sum(costs[m].memory for m in [*resident, model]) - capacity
        victims = _checked(policy, free, need, now, costs) if need > 0 else []
        if need > sum(costs[m].memory for m in victims):
            continue
        for victim in victims:
            resident.remove(victim)
            policy.evicted(victim, now)
        resident.append(model)
        policy.loaded(model, now)
