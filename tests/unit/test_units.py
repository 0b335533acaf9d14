"""Sizes as users write them."""

from __future__ import annotations

import pytest

from coldstart.errors import UsageError
from coldstart.units import parse_size


@pytest.mark.parametrize(("given", "size"), [(5, 5), ("5", 5), ("1.5KiB", 1536), (" 2 GB ", 2 * 10**9)])
def test_parse_size_returns_bytes(given: object, size: int) -> None:
    assert parse_size(given) == size


@pytest.mark.parametrize("given", ["24 apples", "", "-1", -1, 1.5, True, None, ["1GiB"]])
def test_parse_size_names_the_invalid_text(given: object) -> None:
    with pytest.raises(UsageError, match="invalid size") as error:
        parse_size(given)
    assert repr(given) in error.value.message and "14GiB" in str(error.value.hint)
