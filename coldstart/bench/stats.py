"""Compute medians with their range, and percentile-bootstrap confidence intervals for ratios of medians.

The interval is the 2.5th to 97.5th percentile of the statistic over resamples with replacement (Efron and Tibshirani, An
Introduction to the Bootstrap, chapter 13). A paired resample draws complete rounds, so that a slow round cancels out in
the ratio. The resampling is seeded, so equal samples give equal intervals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TypedDict

RESAMPLES = 2000
MIN_SAMPLES = 3


class Summary(TypedDict):
    """Median and range of `n` samples, in the unit of the samples."""

    median: float
    min: float
    max: float
    n: int


def summarize(samples: Sequence[float]) -> Summary:
    """Return the median and range of samples. Raises ValueError if there are none."""
    if not samples:
        raise ValueError("cannot summarize an empty list of samples")
    return {"median": median(samples), "min": min(samples), "max": max(samples), "n": len(samples)}


def paired_ratio(
    numerator: Mapping[int, float], denominator: Mapping[int, float]
) -> tuple[float, tuple[float, float]] | None:
    """Return median(numerator) / median(denominator) over their common rounds, with its 95% confidence interval.

    Both arguments map a round to its sample. Returns None if they have no round in common.
    """
    rounds = sorted(numerator.keys() & denominator.keys())
    if not rounds:
        return None
    top, bottom = ([of[number] for number in rounds] for of in (numerator, denominator))
    return median(top) / median(bottom), ratio_interval(top, bottom, paired=True)


def ratio_interval(
    top: Sequence[float], bottom: Sequence[float], *, paired: bool = False
) -> tuple[float, float]:
    """Return the 95% confidence interval of median(top) / median(bottom). Samples are independent unless they are `paired`."""
    # The help of a command imports this module, and importing numpy would take longer than everything else.
    import numpy as np

    random = np.random.default_rng(0)
    of_top = random.integers(len(top), size=(RESAMPLES, len(top)))
    of_bottom = of_top if paired else random.integers(len(bottom), size=(RESAMPLES, len(bottom)))
    ratios = np.median(np.array(top)[of_top], axis=1) / np.median(np.array(bottom)[of_bottom], axis=1)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(low), float(high)
