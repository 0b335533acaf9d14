"""Equations 1, 2 and 5 with figures that can be followed by hand."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from coldstart.fleet import timing
from coldstart.fleet.timing import Costs, Overlap

COSTS = Costs(
    container_s=2.0, context_s=1.0, library_s=3.0, join_s=0.25, hop_s=0.5, prefill_s=4.0, decode_s=0.1
)


@pytest.mark.parametrize(
    ("overlap", "fetch", "load", "seconds"),
    [
        (Overlap.SEQUENTIAL, 10.0, 50.0, 6.0 + 10.0 + 2.0),
        (Overlap.AFTER_IMPORT, 10.0, 50.0, 10.0 + 2.0),
        (Overlap.AFTER_IMPORT, 100.0, 50.0, 6.0 + 2.0),
        (Overlap.FULL, 10.0, 50.0, 10.0),
        (Overlap.FULL, 100.0, 50.0, 6.0),
        (Overlap.FULL, 100.0, 10.0, 2.0 + 1.0 + 10.0),
    ],
)
def test_a_rank_of_100_bytes(overlap: Overlap, fetch: float, load: float, seconds: float) -> None:
    assert timing.loaded_s(replace(COSTS, overlap=overlap), 100, fetch, load) == seconds


def test_first_token_of_four_ranks_one_of_them_full() -> None:
    """s - w + w/s = 3.25."""
    assert timing.ttft_s(COSTS, 7.0, 4, 1, 1.5) == 1.5 + 7.0 + 0.25 * 4 + 4.0 * 3.25 + 0.5 * 4
    assert timing.tpot_s(COSTS, 4, 1) == pytest.approx(0.1 * 3.25 + 0.5 * 4)
    assert timing.slowdown(4, 4) == timing.slowdown(1, 1) == 1.0


@pytest.mark.parametrize("overlap", Overlap)
def test_a_fetch_within_its_budget_is_a_rank_within_its_term(overlap: Overlap) -> None:
    costs = replace(COSTS, overlap=overlap)
    budget = timing.fetch_budget_s(costs, 100, 50.0, 20.0)
    assert timing.loaded_after(costs, 100, 50.0, budget) == 20.0


def test_no_rate_no_end() -> None:
    assert timing.fetch_s(1, 0.0) == inf and timing.fetch_s(0, 0.0) == 0.0
