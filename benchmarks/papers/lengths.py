"""Lengths of the requests in FastServe's evaluation, and their arrivals.

ALPACA: token counts of the first 335 rows of the data set (traces/README.md), drawn with replacement. ShareGPT's
conversations are not stored here: SHAREGPT draws log-normal lengths with the means that the vLLM paper prints in its
Figure 11 (161.31 and 337.99 tokens). Their coefficients of variation are those of 500 of its first prompts (1.7) and of
Alpaca's outputs (1.1). The real file is replayed by `coldstart trace-replay`.
"""

from __future__ import annotations

from itertools import accumulate, islice
from math import log, sqrt
from random import Random

from pandas import read_csv

from benchmarks.common import HERE
from coldstart.lab.plan import generate_gamma_gaps

Sizes = list[tuple[int, int]]
"""Prompt and output tokens of each request."""
LONGEST = 2048
"""Positions of OPT."""


def alpaca(count: int, seed: int = 1) -> Sizes:
    rows = read_csv(HERE / "traces" / "alpaca_lengths.csv")[["prompt", "output"]].to_numpy().tolist()
    return Random(seed).choices([(prompt, output) for prompt, output in rows], k=count)


def sharegpt(count: int, seed: int = 1) -> Sizes:
    random = Random(seed)
    drawn = ((_draw(random, 161.31, 1.7), _draw(random, 337.99, 1.1)) for _ in iter(int, 1))
    return list(islice((one for one in drawn if sum(one) <= LONGEST), count))


def _draw(random: Random, mean: float, cv: float) -> int:
    spread = log(1 + cv**2)
    return max(1, round(random.lognormvariate(log(mean) - spread / 2, sqrt(spread))))


def arrive(sizes: Sizes, rate: float, cv: float = 1.0, seed: int = 1) -> list[tuple[float, int, int]]:
    """Return the requests with arrivals of a gamma process: seconds, prompt, output."""
    times = accumulate(generate_gamma_gaps(rate, cv, Random(seed)))
    return [(time, *size) for time, size in zip(times, sizes, strict=False)]
