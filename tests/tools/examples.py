"""How many examples a property is tried with: as many as it says, or the loaded profile's share of them."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

WHOLE = 100
"""Hypothesis's own number, which a profile's is a share of."""


def examples(count: int, **options: Any) -> settings:
    """settings(max_examples=count, ...) under the whole profile; proportionally fewer, at least 10, under a quick one."""
    share = settings().max_examples / WHOLE
    return settings(max_examples=max(min(count, 10), round(count * share)), **options)
