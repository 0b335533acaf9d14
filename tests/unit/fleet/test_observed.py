"""Estimated rate of a link from the observed rates of fetches."""

from __future__ import annotations

import pytest

from coldstart.fleet import observed
from coldstart.fleet.observed import LEAST_BYTES, LEAST_S


def test_first_fetch_sets_the_rate_and_later_ones_count_half() -> None:
    first = observed.speed(None, 10 * LEAST_BYTES, 10.0)
    assert first == LEAST_BYTES
    assert observed.speed(first, 20 * LEAST_BYTES, 10.0) == pytest.approx(1.5 * LEAST_BYTES)


def test_join_time_is_averaged_like_the_rate() -> None:
    assert observed.joining(None, 38.0) == 38.0
    assert observed.joining(38.0, 28.0) == 33.0
    assert observed.joining(None, -0.5) == 0.0


def test_slower_link_is_learned_after_some_fetches() -> None:
    speed: float | None = 1e9
    for _ in range(6):
        speed = observed.speed(speed, int(1e9), 10.0)
    assert speed == pytest.approx(1e8, rel=0.2)


def test_very_short_fetch_is_ignored() -> None:
    assert observed.speed(None, 10**12, LEAST_S / 2) is None
    assert observed.speed(5.0, LEAST_BYTES - 1, 100.0) == 5.0
