"""Moments of cron expressions, against dates from a calendar, over changes to and from daylight saving time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from coldstart.errors import UsageError
from coldstart.host.configuration import find_next_moment, parse_crontab


@pytest.fixture(autouse=True)
def _berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def _utc(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("expression", "now", "moments"),
    [
        # Friday 27 November 2026, 8:00 in Berlin is 7:00 UTC; then Monday.
        ("0 8 * * 1-5", "2026-11-26 12:00", ["2026-11-27 07:00", "2026-11-30 07:00", "2026-12-01 07:00"]),
        ("0 8 * * 1-5", "2026-11-27 07:00", ["2026-11-30 07:00"]),
        (
            "*/20 6-7,22 * * *",
            "2026-01-05 06:30",
            ["2026-01-05 06:40", "2026-01-05 21:00", "2026-01-05 21:20"],
        ),
        ("0 0 29 feb *", "2026-01-01 00:00", ["2028-02-28 23:00"]),
        ("30 9 1 jan,jul mon", "2026-12-01 00:00", ["2027-01-01 08:30", "2027-01-04 08:30"]),
        ("5 4 * * sun", "2026-11-25 00:00", ["2026-11-29 03:05"]),
        # 28 March 2027: 2:00 becomes 3:00. 31 October 2027: 3:00 becomes 2:00.
        ("0 8 * * *", "2027-03-27 00:00", ["2027-03-27 07:00", "2027-03-28 06:00"]),
        ("30 2 * * *", "2027-03-27 12:00", ["2027-03-28 01:30", "2027-03-29 00:30"]),
        ("30 2 * * *", "2027-10-30 12:00", ["2027-10-31 00:30", "2027-11-01 01:30"]),
    ],
)
def test_moments_are_those_of_the_calendar(expression: str, now: str, moments: list[str]) -> None:
    at = _utc(now)
    for wanted in moments:
        at = find_next_moment(expression, at)
        assert datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M") == wanted


def test_moment_is_ahead_within_the_repeated_hour() -> None:
    # 2:15 for the second time: 2:30 comes in a quarter of an hour, for the second time.
    now = _utc("2027-10-31 01:15")
    assert find_next_moment("*/30 * * * *", now) == now + 900


@pytest.mark.parametrize(
    "given",
    ["", "8:00", "0 8 * *", "0 0 8 * * 1", "60 8 * * *", "0 8 * * 8", "0 8 30 2 *", "*/0 * * * *", "@daily", 8, "x" * 9999],
)  # fmt: skip
def test_invalid_expression_is_refused_with_a_hint(given: object) -> None:
    with pytest.raises(UsageError, match="cron expression") as caught:
        parse_crontab(given)
    assert "0 8 * * 1-5" in (caught.value.hint or "") and len(caught.value.message) < 300
