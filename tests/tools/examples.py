"""Number of examples of a property test, scaled by the loaded Hypothesis profile."""

from typing import Any

from hypothesis import settings

WHOLE = 100
"""Hypothesis's default number of examples."""


def examples(count: int, **options: Any) -> settings:
    """Return settings with `count` examples under the default profile and proportionally fewer under a quick one."""
    share = settings().max_examples / WHOLE
    return settings(max_examples=max(min(count, 10), round(count * share)), **options)
