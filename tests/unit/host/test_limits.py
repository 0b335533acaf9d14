"""Limits of a gateway: declared once, checked, and documented."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldstart.host.endpoint import GatewayLimits, list_limits

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "gateway-limits.md"


def test_each_limit_is_documented_with_its_default() -> None:
    page, default = PAGE.read_text(encoding="utf-8"), GatewayLimits()
    for name, one in list_limits():
        value = getattr(default, name)
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        assert f"| `{one.flag} {one.unit}` | {shown} |" in page


@pytest.mark.parametrize("name", [name for name, _ in list_limits()])
def test_limit_of_zero_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        GatewayLimits(**{name: 0})
