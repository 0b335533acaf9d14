"""Time that a client states for a model to stay."""

from __future__ import annotations

from math import inf

import pytest

from coldstart.host.live.headers import parse_keep_alive


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("300", 300), ("0", 0), ("1.5", 1.5), ("5m", 300), ("1h30m", 5400), ("90s", 90), ("500ms", 0.5), (" 5m ", 300),
        ("-1", inf), ("-1s", inf), ("-5m", inf), ("9" * 400, inf),
    ],
)  # fmt: skip
def test_keep_alive_is_read_as_seconds(text: str, seconds: float) -> None:
    assert parse_keep_alive(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "-", "m", "5x", "5 m", "nan", "inf", "1e3", "5m5", "--1", "\u0665", "1_0", "x" * 10_000]
)
def test_keep_alive_is_refused_when_it_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="invalid keep-alive") as caught:
        parse_keep_alive(text)
    assert len(str(caught.value)) < 200
