"""Equation 5 of ParaServe against the authors' 14 cold TTFTs, in sample and with one model left out. Computed.

    TTFT(M, s) = max(C, M / (s b)) + r + t s

Here C is container, context and libraries; r is the first token; t is the cost of each rank; b is the link. For each split of
the points by the side of the maximum this is a linear least-squares problem in (C, r, 1/b, t), weighted for relative errors.
A seeded random search then minimises the largest error. Only OPT-2.7B on one worker is bound by C, so t is bounded by 0.2 s.
Serverless vLLM and ServerlessLLM fetch and load sequentially: a + c M.

Run: python -m benchmarks fleet/cold_ttft
Time: about a minute
Result: fleet-cold-ttft.json
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from statistics import fmean

import numpy as np

from benchmarks.common import finish
from benchmarks.fleet.published import CLAIMED_TTFT, COLD_TTFT_S, SIZES_GB

WORKERS = {"one worker": 1, "four workers": 4}
HELD, MOST_RANK_S, ITERATIONS = 1e-3, 0.2, 8_000
Matrix = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
ASKED_IN_SAMPLE, ASKED_LEFT_OUT = 0.07, 0.12


@dataclass(frozen=True, slots=True)
class Point:
    model: str
    size_gb: float
    ranks: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Parameters of a fit in seconds and GB/s."""

    runtime_s: float
    first_s: float
    bandwidth_gb_s: float
    rank_s: float

    def predicted(self, size_gb: float, ranks: int) -> float:
        fetch = size_gb / ranks / self.bandwidth_gb_s
        return max(self.runtime_s, fetch) + self.first_s + self.rank_s * ranks


def points() -> list[Point]:
    return [
        Point(model, SIZES_GB[model], ranks, seconds)
        for kind, ranks in WORKERS.items()
        for model, seconds in zip(SIZES_GB, COLD_TTFT_S[kind], strict=True)
    ]


def fit(given: Sequence[Point]) -> Fit:
    """Return the fit with the smallest largest relative error over all splits.

    Raises:
        ValueError: No split is consistent.
    """
    shares = sorted({p.size_gb / p.ranks for p in given})
    found = [one for at in range(1, len(shares)) if (one := _split(given, shares[at])) is not None]
    if not found:
        raise ValueError("no split of the points agrees with its own fit")
    return min((_searched(one, given) for one in found), key=lambda one: max(errors(one, given)))


def _split(given: Sequence[Point], fetch_from: float) -> Fit | None:
    """Return the fit if the link bounds ranks of at least `fetch_from` GB and the runtime bounds the others."""
    bound = [p.size_gb / p.ranks >= fetch_from for p in given]
    rows = [[not f, 1.0, f * p.size_gb / p.ranks, p.ranks] for p, f in zip(given, bound, strict=True)]
    weighted = np.array(rows) / [[p.seconds] for p in given]
    # The last row keeps t small.
    left = np.append(weighted, [[0.0, 0.0, 0.0, HELD]], axis=0)
    (runtime, first, per_gb, rank), *_ = np.linalg.lstsq(left, np.append(np.ones(len(rows)), 0.0))
    if min(runtime, first, per_gb) <= 0 or rank < 0:
        return None
    agrees = all((p.size_gb / p.ranks * per_gb >= runtime) == f for p, f in zip(given, bound, strict=True))
    return Fit(float(runtime), float(first), float(1 / per_gb), float(rank)) if agrees else None


def _searched(start: Fit, given: Sequence[Point]) -> Fit:
    """Lower the largest error by random steps of decreasing size."""
    sizes, seconds = np.array([p.size_gb / p.ranks for p in given]), np.array([p.seconds for p in given])
    ranks, random = np.array([p.ranks for p in given]), np.random.default_rng(0)

    def cost(x: Matrix) -> float:
        predicted = np.maximum(x[0], sizes / x[2]) + x[1] + x[3] * ranks
        possible = x.min() >= 0 and x[3] <= MOST_RANK_S
        return float(np.abs(predicted / seconds - 1).max()) if possible else np.inf

    best = np.array(astuple(start))
    best[3] = min(best[3], MOST_RANK_S)
    least, scale = cost(best), 0.2
    for step in range(ITERATIONS):
        scale *= 0.5 if step % (ITERATIONS // 16) == 0 else 1.0
        tried = best + random.normal(0, scale, 4) * np.array([1.0, 1.0, 0.2, 0.1])
        if (found := cost(tried)) < least:
            best, least = tried, found
    return Fit(*(float(value) for value in best))


def errors(found: Fit, given: Sequence[Point]) -> list[float]:
    return [abs(found.predicted(p.size_gb, p.ranks) / p.seconds - 1) for p in given]


def cross_validate(given: Sequence[Point]) -> dict[str, float]:
    """Return the larger error on each model's two points with a fit of the other models."""
    result = {}
    for model in SIZES_GB:
        rest = fit([p for p in given if p.model != model])
        result[model] = max(errors(rest, [p for p in given if p.model == model]))
    return result


def line(kind: str) -> dict[str, float]:
    """Fit a + c M to a system that fetches and loads sequentially, by least squares of relative errors."""
    sizes, seconds = np.array(list(SIZES_GB.values())), np.array(COLD_TTFT_S[kind])
    rows = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
    (constant, per_gb), *_ = np.linalg.lstsq(rows, np.ones(len(sizes)))
    worst = np.abs((constant + per_gb * sizes) / seconds - 1).max()
    return {"constant_s": float(constant), "s_per_gb": float(per_gb), "worst_error": float(worst)}


def main() -> None:
    given = points()
    found = fit(given)
    each, out = errors(found, given), cross_validate(given)
    ratios = [v / p for v, p in zip(COLD_TTFT_S["serverless vLLM"], COLD_TTFT_S["four workers"], strict=True)]
    line_of = {kind: line(kind) for kind in ("serverless vLLM", "ServerlessLLM")}
    vllm = line_of["serverless vLLM"]
    modelled = [
        (vllm["constant_s"] + vllm["s_per_gb"] * size) / found.predicted(size, 4)
        for size in SIZES_GB.values()
    ]
    finish(
        "fleet-cold-ttft",
        {
            "kind": "computed from published figures",
            "fit": asdict(found),
            "in_sample": {"worst": max(each), "mean": fmean(each), "asked": ASKED_IN_SAMPLE},
            "left_out": {"worst": max(out.values()), "asked": ASKED_LEFT_OUT, "by_model": out},
            "others": line_of,
            "vllm_over_four_workers": {
                "claimed": CLAIMED_TTFT,
                "published": max(ratios),
                "modelled": max(modelled),
            },
            "rows": [
                {
                    "model": p.model,
                    "ranks": p.ranks,
                    "published_s": p.seconds,
                    "predicted_s": found.predicted(p.size_gb, p.ranks),
                }
                for p in given
            ],
        },
    )


if __name__ == "__main__":
    main()
