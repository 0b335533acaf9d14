"""Arrival processes by rate and coefficient of variation.

Equation: Gamma gaps with shape 1/CV^2 and mean 1/rate; CV 1 is the Poisson process, larger is burstier.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from random import Random

from coldstart.lab.traces.request import TraceError, TraceRequest


def gamma_gaps(rate: float, cv: float, random: Random) -> Iterator[float]:
    """Yield endless gaps in seconds. Raises TraceError unless rate > 0 and cv > 0."""
    if rate <= 0 or cv <= 0:
        raise TraceError(
            f"arrivals need a rate and a CV above zero, got rate {rate} and CV {cv}",
            hint="write --rate 1 --cv 1, or larger values",
        )
    shape = 1 / cv**2
    while True:
        yield random.gammavariate(shape, 1 / (rate * shape))


def rearrive(rows: Iterable[TraceRequest], rate: float, cv: float, seed: int) -> Iterator[TraceRequest]:
    """Yield the same requests with the arrivals of a gamma process of `rate` per second instead of their own times."""
    gaps, now = gamma_gaps(rate, cv, Random(seed)), 0.0
    for row in rows:
        now += next(gaps)
        yield replace(row, arrival_s=now)
