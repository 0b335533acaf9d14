"""Medians with their spread, and percentile-bootstrap confidence intervals of ratios of medians.

The interval is the 2.5th to 97.5th percentile of the statistic over resamples with replacement (Efron and
Tibshirani, An Introduction to the Bootstrap, chapter 13). Paired: one resample draws whole rounds, so that
what slowed a round cancels in the ratio. Resampling is seeded: the same samples give the same interval.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import median
from typing import TypedDict, TypeVar

T = TypeVar("T")

RESAMPLES = 2000
MIN_SAMPLES = 3


class Summary(TypedDict):
    """Median and range of `n` samples, in the samples' unit."""

    median: float
    min: float
    max: float
    n: int


def summarize(samples: Sequence[float]) -> Summary:
    """Raises ValueError when there are no samples."""
    if not samples:
        raise ValueError("no samples to summarize")
    return {"median": median(samples), "min": min(samples), "max": max(samples), "n": len(samples)}


def paired_ratio(
    numerator: dict[int, float], denominator: dict[int, float]
) -> tuple[float, tuple[float, float]] | None:
    """median(numerator) / median(denominator) over the rounds both have, and its 95 % interval.

    Arguments are samples by round. None when they share no round.
    """
    pairs = [(numerator[key], denominator[key]) for key in sorted(numerator.keys() & denominator.keys())]
    if not pairs:
        return None
    return _ratio(pairs), _interval(lambda draw: _ratio(draw(pairs)))


def ratio_interval(numerator: Sequence[float], denominator: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the ratio of medians of two independent samples."""
    return _interval(lambda draw: median(draw(numerator)) / median(draw(denominator)))


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return median(top for top, _ in pairs) / median(bottom for _, bottom in pairs)


def _interval(statistic: Callable[[_Draw], float]) -> tuple[float, float]:
    draw = _Draw()
    values = sorted(statistic(draw) for _ in range(RESAMPLES))
    return values[int(0.025 * RESAMPLES)], values[int(0.975 * RESAMPLES) - 1]


class _Draw:
    """A seeded resample with replacement, of the same size."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    def __call__(self, samples: Sequence[T]) -> list[T]:
        return self._random.choices(samples, k=len(samples))
