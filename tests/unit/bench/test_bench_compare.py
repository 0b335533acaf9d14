"""A regression is reported only if noise cannot explain it."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstart.bench import compare, facts
from coldstart.bench.result import SCHEMA_VERSION
from coldstart.bench.stats import paired_ratio, ratio_interval, summarize
from coldstart.errors import UsageError


def verdict(now: list[float], then: list[float], *, alike: bool = True) -> str:
    return str(compare.compare_samples(now, then, 10, is_same_machine=alike)["verdict"])


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ([13.0, 13.1, 12.9, 13.0, 13.2], "regression"),
        ([10.1, 10.0, 10.2, 9.9, 10.0], "ok"),
        ([5.0, 5.1, 5.0, 5.2, 4.9], "ok"),
        ([8.0, 14.0, 12.0, 9.0, 13.0], "inconclusive"),
        ([20.0, 20.0], "inconclusive"),
    ],
)
def test_change_returns_the_verdict(now: list[float], expected: str) -> None:
    assert verdict(now, [10.0, 10.1, 9.9, 10.0, 10.05]) == expected


def document(seconds: list[float], **more: object) -> dict[str, Any]:
    samples = [{"round": i, "first_token_s": s, "cpu_s": 1.0} for i, s in enumerate(seconds)]
    return {
        "kind": "bench",
        "schema_version": SCHEMA_VERSION,
        "machine": facts.describe_machine(),
        "modes": {"fresh": {"samples": samples}, "snapshot": {"unavailable": "no"}},
        **more,
    }


def test_documents_are_compared_by_the_modes_both_measured() -> None:
    found = compare.compare_documents(document([20.0] * 5), document([10.0] * 5), 50)
    assert found["modes"] == {
        "fresh": {"verdict": "regression", "change_pct": 100.0, "ci95_pct": (100.0, 100.0), "reason": None}
    }
    assert compare.describe_regressions(found) == [
        "fresh: 100.0 % slower than the baseline (at least 100.0 %, allowed 50 %)"
    ]


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", json.dumps(document([1.0], schema_version=99)), json.dumps({"kind": "bench"})]
)
def test_load_refuses_a_file_that_is_not_a_baseline(tmp_path: Path, text: str) -> None:
    path = tmp_path / "base.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        compare.load_baseline(path)
    assert caught.value.hint is not None and "bench" in caught.value.hint


seconds = st.floats(0.1, 100)


def test_summarize_returns_median_and_range() -> None:
    assert summarize([3, 1, 2]) == {"median": 2, "min": 1, "max": 3, "n": 3}
    with pytest.raises(ValueError, match="no samples"):
        summarize([])


def test_a_paired_ratio_cancels_what_rounds_share() -> None:
    slow = {0: 10.0, 1: 40.0, 2: 20.0, 3: 30.0, 4: 100.0}
    result = paired_ratio(slow, {key: value / 5 for key, value in slow.items()})
    assert result is not None
    ratio, (low, high) = result
    assert ratio == low == high == 5


@given(st.lists(seconds, min_size=3, max_size=9), st.lists(seconds, min_size=3, max_size=9))
def test_the_interval_is_repeatable_and_within_the_extremes(one: list[float], two: list[float]) -> None:
    low, high = ratio_interval(one, two)
    assert min(one) / max(two) <= low <= high <= max(one) / min(two)
    assert (low, high) == ratio_interval(one, two)
