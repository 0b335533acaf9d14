"""Iteration times as functions of the prefill tokens and of the decode batch size, interpolated between measured points.

Invariant: both curves are non-decreasing, so the predicted first iteration of a longer prompt is never shorter
(FastServe, section 4.1: the job profiler).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import msgspec

Point = tuple[float, float]

CONTEXT_SHARE = 1e-5
"""Extra iteration time per token of context, as a share of the time of an iteration with one request.

It corresponds to 131 kB of KV per token and 16 GB of weights, as in a bfloat16 model with 8e9 parameters and
grouped-query attention (groups of four). An iteration reads both at the same bandwidth.
"""


class ProfileError(ValueError):
    """Error for an invalid iteration profile. The message names the invalid part."""


class _Section(msgspec.Struct):
    """The `iterations` section of a bundle: lists of [size, seconds]."""

    prefill: list[Point]
    decode: list[Point]


@dataclass(frozen=True, slots=True)
class Curve:
    """Non-decreasing piecewise linear function through measured points, extrapolated linearly beyond the last."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    @classmethod
    def from_points(cls, points: Iterable[tuple[float, float]], name: str) -> Curve:
        """Build a curve from points. Replace each y by the minimum of itself and all y at larger x.

        Noise only lengthens measured times, so the lower value is more accurate. Raises ProfileError if a point is
        invalid.
        """
        ordered = sorted((float(x), float(y)) for x, y in points)
        if not ordered:
            raise ProfileError(f"invalid iteration profile: {name} has no points")
        if any(y <= 0 for _, y in ordered):
            raise ProfileError(f"invalid iteration profile: {name} has a time that is zero or negative")
        if any(a == b for (a, _), (b, _) in pairwise(ordered)):
            raise ProfileError(f"invalid iteration profile: {name} has more than one time for the same size")
        lowest = list(accumulate((y for _, y in reversed(ordered)), min))
        return cls(tuple(x for x, _ in ordered), tuple(reversed(lowest)))

    def __call__(self, x: float) -> float:
        if x <= self.xs[0] or len(self.xs) == 1:
            return self.ys[0]
        right = min(bisect_left(self.xs, x), len(self.xs) - 1)
        x0, x1, y0, y1 = self.xs[right - 1], self.xs[right], self.ys[right - 1], self.ys[right]
        return y0 + (x - x0) * (y1 - y0) / (x1 - x0)


@dataclass(frozen=True, slots=True)
class IterationProfile:
    """Iteration times of one model on one machine, in seconds.

    `prefill` maps the number of prompt tokens in an iteration to seconds, and `decode` the number of decoding requests.
    """

    prefill: Curve
    decode: Curve

    @classmethod
    def create(cls, prefill: Iterable[Point], decode: Iterable[Point]) -> IterationProfile:
        return cls(Curve.from_points(prefill, "prefill"), Curve.from_points(decode, "decode"))

    @classmethod
    def parse(cls, document: object) -> IterationProfile:
        """Parse a bundle's `iterations` section, and ignore unknown fields. Raises ProfileError if it is invalid."""
        try:
            found = msgspec.convert(document, _Section)
        except (
            msgspec.ValidationError,
            OverflowError,
        ) as error:  # an integer can exceed the range of a float
            raise ProfileError(f"invalid iteration profile: {error}") from error
        return cls.create(found.prefill, found.decode)

    def encode(self) -> dict[str, list[list[float]]]:
        """Return the `iterations` section, from which `parse` creates an equal profile."""
        curves = {"prefill": self.prefill, "decode": self.decode}
        return {name: [[x, y] for x, y in zip(c.xs, c.ys, strict=True)] for name, c in curves.items()}

    @property
    def shortest_iteration_s(self) -> float:
        """Return the shortest iteration time in seconds, which is the default quantum of the first queue."""
        return min(self.prefill.ys[0], self.decode.ys[0])

    def predict_iteration_s(self, prefill_tokens: int, decode_batch: int) -> float:
        """Return the time of one iteration with prefill tokens and decoding requests, in seconds.

        Both parts share one pass over the weights, so the smaller of their minimum times is counted only once.
        """
        if not prefill_tokens:
            return self.decode(decode_batch) if decode_batch else 0.0
        if not decode_batch:
            return self.prefill(prefill_tokens)
        return self.prefill(prefill_tokens) + self.decode(decode_batch) - self.shortest_iteration_s


FALLBACK_PROFILE = IterationProfile.create(
    [(1, 0.025), (512, 0.1), (8192, 1.6)], [(1, 0.025), (64, 0.04), (256, 0.08)]
)
"""Profile for servers without a measured profile. Queues depend only on ratios, so a plausible shape suffices."""
