"""The queue model agrees with vLLM's own scheduler, and the shadow predicts within its bounds."""

from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstart.scheduling.profile import IterationProfile
from coldstart.scheduling.shadow import MAX_REQUESTS, MIN_REQUESTS, FinishedRequest, QueueModel, Shadow

PROFILE = IterationProfile.create([(1, 0.01), (100, 0.02), (1000, 0.2)], [(1, 0.01), (64, 0.03)])
REQUESTS = st.lists(
    st.tuples(st.floats(0, 0.5), st.integers(1, 900), st.floats(0, 1), st.integers(0, 60)), max_size=40
)


def arrive(rows: list[tuple[float, int, float, int]]) -> list[FinishedRequest]:
    now, found = 0.0, []
    for gap, prompt, cached, output in rows:
        now += gap
        found.append(FinishedRequest(now, prompt, int(cached * prompt), output))
    return found


@given(REQUESTS, st.integers(1, 8), st.sampled_from([16, 200, 4000]), st.sampled_from([8, 2048]))
def test_every_request_is_served_when_memory_and_budget_are_small(
    rows: list[tuple[float, int, float, int]], batch: int, kv_tokens: int, budget: int
) -> None:
    requests = arrive(rows)
    done = QueueModel(PROFILE, batch, budget, kv_tokens).replay(requests, lambda one: one.arrival_s)
    for one, ttft_s, latency_s in zip(requests, *done, strict=True):
        alone_s = PROFILE.prefill(min(budget, max(1, one.prompt - one.cached)))
        assert alone_s * 0.999 <= ttft_s <= latency_s < float("inf")
        assert latency_s >= ttft_s + (max(1, one.output) - 1) * PROFILE.decode(1) * 0.999


def test_a_prompt_is_served_alone_by_hand() -> None:
    model = QueueModel(PROFILE, 1, 2048, 9999, context_s=0.0)
    done = model.replay(
        [FinishedRequest(1.0, 1000, 0, 3), FinishedRequest(1.0, 1000, 900, 1)], lambda one: one.arrival_s
    )
    assert done.ttft_s == pytest.approx([0.2, 0.24]) and done.latency_s == pytest.approx([0.22, 0.24])


def traffic(count: int) -> list[FinishedRequest]:
    random = Random(1)
    return [
        FinishedRequest(number * 0.05, random.choice([10, 900]), 0, random.randrange(1, 30), 0.5)
        for number in range(count)
    ]


def test_the_other_order_is_predicted_from_the_latest_requests() -> None:
    model = QueueModel(PROFILE, 4, 2048, 4000)
    fcfs, deadline = (
        Shadow(model, lambda tokens: 64 * PROFILE.prefill(tokens), serves_deadlines=own)
        for own in (False, True)
    )
    for one in traffic(MIN_REQUESTS - 1):
        fcfs.add(one)
    assert fcfs.predict() is None
    for one in traffic(2 * MAX_REQUESTS):
        fcfs.add(one)
        deadline.add(one)
    found, reverse = fcfs.predict(), deadline.predict()
    assert found is not None and reverse is not None and found.requests == MAX_REQUESTS
    assert found.ttft_gain > 1.1 and reverse.ttft_gain == pytest.approx(1 / found.ttft_gain)
    model_ttft_s = fmean(
        model.replay(traffic(2 * MAX_REQUESTS)[-MAX_REQUESTS:], lambda one: one.arrival_s).ttft_s
    )
    assert found.model_ratio == pytest.approx(model_ttft_s / 0.5)
