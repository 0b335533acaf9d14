"""Sizes as users write them."""

from __future__ import annotations

import pytest

from coldstart.errors import UsageError
from coldstart.units import format_memory, parse_size


@pytest.mark.parametrize(("given", "size"), [(5, 5), ("5", 5), ("1.5KiB", 1536), (" 2 GB ", 2 * 10**9)])
def test_parse_size_returns_bytes(given: object, size: int) -> None:
    assert parse_size(given) == size


@pytest.mark.parametrize(
    ("size", "text"),
    [(1200 << 20, "1200.0 MiB"), ((10 << 30) - (1 << 20), "10239.0 MiB"), (60 << 30, "60.00 GiB")],
)
def test_format_memory_has_the_unit_in_which_limits_are_written(size: int, text: str) -> None:
    assert format_memory(size) == text


@pytest.mark.parametrize("given", ["24 apples", "", "-1", -1, 1.5, True, None, ["1GiB"]])
def test_parse_size_names_the_invalid_text(given: object) -> None:
    with pytest.raises(UsageError, match="invalid size") as error:
        parse_size(given)
    assert repr(given) in error.value.message and "14GiB" in str(error.value.hint)
