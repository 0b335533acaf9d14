"""Rate limits: the token bucket, and a prefetcher that follows a rate and its changes."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from prefetching import Weights, check_whole
from support.range_server import RangeServer

from coldstart.contract.weights import PacedFetch
from coldstart.weights.prefetch import client
from coldstart.weights.prefetch.paces import BURST_S, TokenBucket


def test_a_bucket_never_lets_more_through_than_its_rate_and_never_less() -> None:
    for seed in range(200):
        chance = Random(seed)
        bucket, now, spent, allowed = TokenBucket(100.0), 0.0, 0, 0.0
        rate = 100.0
        for _ in range(50):
            size = chance.randrange(1, 60)
            bucket.take(size, now)
            spent += size
            waited = bucket.wait_s(now)
            allowed, now = allowed + rate * waited, now + waited
            # A busy reader passes exactly at the rate.
            assert spent == pytest.approx(allowed)
            if chance.random() < 0.2:
                rate = chance.choice([20.0, 100.0, 900.0])
                bucket.change(rate, now)


def test_debt_is_paid_at_the_new_rate() -> None:
    bucket = TokenBucket(100.0)
    bucket.take(100, 0.0)
    bucket.change(10.0, 0.5)
    assert bucket.wait_s(0.5) == pytest.approx(5.0)
    bucket.change(None, 0.5)
    assert bucket.wait_s(0.5) == 0
    bucket.take(10**9, 0.5)
    assert bucket.wait_s(0.5) == 0


def test_prefetcher_follows_a_changed_rate(weights: Weights, server: RangeServer, runtime: Path) -> None:
    rate, began = 200e3, time.monotonic()
    pace = PacedFetch("worker", rate)
    with client.start_early(server.url, weights.plan, pace=pace, directory=runtime):
        said: dict[str, Any] = {"bytes": 0}
        while said["bytes"] < 300e3:
            with suppress(client.PrefetchLostError):  # the prefetcher has not started yet
                said = client.set_pace(pace, directory=runtime) or said
            time.sleep(0.02)
        # Each stream holds at most one more piece.
        assert said["bytes"] <= rate * (time.monotonic() - began + BURST_S) + 4 * 256e3
        assert said["limited"] and not said["ended"]
        with client.attach(server.url, weights.plan, pace=pace, directory=runtime) as attached:
            client.set_pace(PacedFetch("worker", None), directory=runtime)
            check_whole(attached, weights)
        said = client.set_pace(PacedFetch("worker", None), directory=runtime) or {}
        assert said["ended"] and said["bytes"] == sum(map(len, weights.data.values()))


@pytest.mark.parametrize("rate", [0, -1, "fast", True])
def test_invalid_rate_is_refused(weights: Weights, runtime: Path, rate: object) -> None:
    with (
        client.attach(str(weights.directory), weights.plan, directory=runtime),
        pytest.raises(client.PrefetchError),
    ):
        client.set_pace(PacedFetch("worker", rate), directory=runtime)  # type: ignore[arg-type]
