"""Hazards learned with censoring and decay, the tables and indices made of them, on numbers worked out by hand."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstart.scheduling import IterationProfile
from coldstart.scheduling.express.index import (
    LEAST_CHANCE,
    UNSURE,
    Index,
    Pressure,
    Standing,
    size,
    tokens_of,
)
from coldstart.scheduling.express.lengths import (
    CLASS_TRUST,
    EDGES,
    LONGEST,
    MIDS,
    MOST_CLASSES,
    Expected,
    Hazard,
    Lengths,
    bin_of,
)
from coldstart.scheduling.express.tables import HazardTable

PROFILE = IterationProfile.from_points([(1, 0.01), (1001, 0.11)], [(1, 0.01), (64, 0.01)])
FLAT = Pressure(batch=16)


def learned(outputs: list[int], kind: object = None) -> Lengths:
    lengths = Lengths(400.0, 40)
    for tokens in outputs:
        lengths.left(kind, tokens)
    return lengths


def index_of(lengths: Lengths, pressure: Pressure = FLAT) -> Index:
    index = Index(PROFILE, lengths)
    index.refresh(pressure, {})
    return index


@given(st.integers(0, 1 << 20))
def test_a_length_lies_in_its_bin(tokens: int) -> None:
    found = bin_of(tokens)
    assert EDGES[found] <= max(1, tokens)
    assert found == len(EDGES) - 1 or tokens < EDGES[found + 1]


@given(st.integers(1, 1 << 17))
def test_sizes_keep_half_an_octave(tokens: int) -> None:
    assert tokens / 1.5 <= tokens_of(size(tokens)) <= 1.5 * tokens
    assert size(0) == 0 and tokens_of(0) == 0


def test_the_hazard_is_who_ended_over_who_got_there() -> None:
    hazard = Hazard(1e9)
    for tokens in (1, 1, 2, 3):
        hazard.end(tokens)
    assert hazard.rates({}, [0.0] * len(EDGES), 0.0 + 1e-12)[:3] == pytest.approx([0.5, 0.5, 1.0])


def test_who_is_cut_off_or_still_runs_outlived_the_bins_before() -> None:
    hazard = Hazard(1e9)
    hazard.end(1)
    hazard.end(3, cut=True)
    rates = hazard.rates({4: 2}, [0.0] * len(EDGES), 1e-12)
    assert rates[:3] == pytest.approx([1 / 4, 0.0, 0.0])
    assert len(rates) >= 4


def test_without_the_live_ones_an_overloaded_server_would_learn_short_ones_only() -> None:
    hazard = Hazard(400.0)
    for _ in range(50):
        hazard.end(2)
    alone, beside = (hazard.rates(live, None, 4.0)[1] for live in ({}, {20: 50}))
    assert beside < 0.6 * alone


def test_what_was_learned_is_half_forgotten_after_the_half_life() -> None:
    hazard = Hazard(64.0)
    for _ in range(64):
        hazard.end(1)
    before = hazard.ended[0]
    for _ in range(64):
        hazard.end(100)
    assert hazard.ended[0] == pytest.approx(before / 2, rel=0.02)


def test_a_class_has_a_table_of_its_own_only_from_its_trust_on() -> None:
    lengths = learned([10] * 100)
    for _ in range(CLASS_TRUST):
        lengths.left("a", 500)
    assert lengths.known("a") is None
    for _ in range(4):
        lengths.left("a", 500)
    assert lengths.known("a") == "a" and lengths.known("b") is None
    index = index_of(lengths)
    assert index.table("a").mean > 3 * index.table(None).mean


@given(st.integers(1, LONGEST.bit_length() - 2))
def test_what_a_caller_expects_ends_nine_of_ten_within_a_factor_of_two_and_then_says_nothing(
    octave: int,
) -> None:
    everybody, low, high = [0.25] * len(EDGES), 2 ** (octave - 2), 2 ** (octave + 1)
    rates, alive = Expected(None, octave).hazard(everybody), 1.0
    assert len(rates) == len(EDGES)
    for (begins, ends), rate in zip(pairwise(EDGES), rates, strict=False):
        if begins >= high:
            assert rate == 0.25
        elif ends <= low:
            assert rate == 0
        else:
            assert 0 < rate < 1
            alive *= 1 - rate
    assert alive == pytest.approx(0.1)


def test_a_hint_stands_until_its_class_has_a_table_of_its_own() -> None:
    lengths, hinted = learned([10] * 100), Expected("adapter", 9)
    assert lengths.known(hinted) == Expected(None, 9)
    index = index_of(lengths)
    assert 200 < index.table(hinted).mean < 800 and index.table(None).mean < 20
    for _ in range(CLASS_TRUST + 4):
        lengths.left(hinted, 20)
    assert lengths.known(hinted) == hinted
    assert index_of(lengths).table(hinted).mean < 200


def test_classes_without_number_take_no_more_memory() -> None:
    lengths = Lengths()
    for number in range(2 * MOST_CLASSES):
        lengths.left(number, 10)
    assert len(lengths.classes) == MOST_CLASSES


def test_a_table_sums_what_is_ahead_of_a_request() -> None:
    # Half end in the first bin, the others in the third.
    table = HazardTable.of([0.5, 0.0, 1.0])
    assert table.tail == (1.0, 0.5, 0.5, 0.0)
    assert table.inverse == pytest.approx(0.5 / MIDS[0] + 0.5 / MIDS[2])
    assert table.mean == pytest.approx(0.5 * MIDS[0] + 0.5 * MIDS[2])


def test_a_constant_length_is_worth_no_more_than_the_main_lane() -> None:
    index = index_of(learned([100] * 2000), Pressure(batch=16, prompt=tokens_of(size(100))))
    fresh = index.worth(Standing(None, 0, size(100), size(100)))
    assert fresh.index == pytest.approx(index.base, rel=0.1)
    assert fresh.chance > 0.9


def test_a_heavy_tail_gives_the_young_a_short_quantum_and_a_high_index() -> None:
    random = Random(1)
    outputs = [15 if random.random() < 0.9 else 900 for _ in range(2000)]
    index = index_of(learned(outputs), Pressure(batch=16, prompt=100.0))
    fresh = index.worth(Standing(None, 0, size(100), size(100)))
    assert fresh.index > 2 * index.base
    assert 15 < fresh.until < 40 and 0.8 < fresh.chance < 1
    old = index.worth(Standing(None, bin_of(100), size(100), 0))
    assert old.index < index.base


@given(st.lists(st.integers(1, 3000), min_size=60, max_size=200), st.integers(1, 2000), st.booleans())
def test_an_index_is_the_best_of_all_quanta(outputs: list[int], attained: int, binds: bool) -> None:
    index = index_of(learned(outputs), Pressure(16, binds, 300.0, 100.0, 8))
    table, a, unit = index.table(None), bin_of(attained), index.unit_s()
    found = index.worth(Standing(None, a, size(200), size(50)))
    a = min(a, table.bins - 1)
    by_hand = 0.0
    for end in range(a, table.bins):
        alive, left, value, cost = table.tail[a], table.tail[a], 0.0, index.start_s(tokens_of(size(50)))
        for k in range(a, end + 1):
            step = MIDS[k] - (MIDS[k - 1] if k else 0.0)
            held = (tokens_of(size(200)) + MIDS[k]) / 300.0 if binds else 1.0
            cost += table.tail[k] / alive * step * held * unit
            value += (table.tail[k] - table.tail[k + 1]) / alive / MIDS[k]
            left = table.tail[k + 1]
        if left <= (1 - LEAST_CHANCE) * alive:
            by_hand = max(by_hand, value / (cost + left / alive * (index.start_s(8) if binds else 0.0)))
    assert found.index == pytest.approx(by_hand * max(UNSURE, found.chance), rel=1e-6)
    assert 0 <= found.chance <= 1 + 1e-9


def test_indices_are_kept_until_the_tables_or_the_pressure_change() -> None:
    index = index_of(learned([10] * 100))
    version = index.version
    index.refresh(FLAT, {})
    assert index.version == version
    index.refresh(Pressure(batch=16, binds=True), {})
    assert index.version == version + 1
