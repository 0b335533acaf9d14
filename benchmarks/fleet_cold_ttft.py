"""Equation 5 against the authors' 14 cold TTFTs (seven models on one worker and on four), in sample and with a model left out.

    TTFT(M, s) = max(C, M / (s b)) + r + t s

C is container, context and libraries, r the first token, t what each rank adds, b the link. Which side of the maximum counts
depends on the parameters: for each split of the points by size it is linear in (C, r, 1/b, t), and the fit is the one with the
least worst relative error (Lawson's weights), of all splits that agree with themselves. Where the points leave t open (without
OPT-2.7B no single worker is bound by C), the smallest is taken. Serverless vLLM and ServerlessLLM fetch and load in turn: a + c M.

    python benchmarks/fleet_cold_ttft.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import finish
from benchmarks.fleet_published import CLAIMED_TTFT, COLD_TTFT_S, SIZES_GB
from coldstart.measure.bench import facts

WORKERS = {"one worker": 1, "four workers": 4}
HELD, ITERATIONS = 1e-3, 300
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
    """Seconds, and GB/s."""

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
    """The least worst relative error over all splits. Raises ValueError where no split agrees with itself."""
    shares = sorted({p.size_gb / p.ranks for p in given})
    found = [one for at in range(1, len(shares)) if (one := _split(given, shares[at])) is not None]
    if not found:
        raise ValueError("no split of the points agrees with its own fit")
    return min(found, key=lambda one: max(errors(one, given)))


def _split(given: Sequence[Point], fetch_from: float) -> Fit | None:
    """The fit if ranks of at least so many GB are bound by the link, and the others by the runtime."""
    bound = [p.size_gb / p.ranks >= fetch_from for p in given]
    rows = [[not f, 1.0, f * p.size_gb / p.ranks, p.ranks] for p, f in zip(given, bound, strict=True)]
    runtime, first, per_gb, rank = _minimax(np.array(rows) / [[p.seconds] for p in given])
    if min(runtime, first, per_gb) <= 0 or rank < 0:
        return None
    agrees = all((p.size_gb / p.ranks * per_gb >= runtime) == f for p, f in zip(given, bound, strict=True))
    return Fit(float(runtime), float(first), float(1 / per_gb), float(rank)) if agrees else None


def _minimax(rows: Matrix) -> tuple[float, float, float, float]:
    """x with the least max |rows x - 1|: squares, reweighted by their own errors; the last member is held small."""
    weights, held = np.full(len(rows), 1 / len(rows)), np.array([[0.0, 0.0, 0.0, HELD]])
    best, worst = (0.0, 0.0, 0.0, 0.0), np.inf
    for _ in range(ITERATIONS):
        root = np.sqrt(weights)
        left = np.concatenate([rows * root[:, None], held])
        solution, *_ = np.linalg.lstsq(left, np.append(root, 0.0))
        error = np.abs(rows @ solution - 1)
        if error.max() < worst:
            worst, best = error.max(), tuple(float(value) for value in solution)  # type: ignore[assignment]
        weights = weights * (error + 1e-9)
        weights /= weights.sum()
    return best


def errors(found: Fit, given: Sequence[Point]) -> list[float]:
    return [abs(found.predicted(p.size_gb, p.ranks) / p.seconds - 1) for p in given]


def left_out(given: Sequence[Point]) -> dict[str, float]:
    """The larger error on a model's two points with a fit of the others."""
    result = {}
    for model in SIZES_GB:
        rest = fit([p for p in given if p.model != model])
        result[model] = max(errors(rest, [p for p in given if p.model == model]))
    return result


def line(kind: str) -> dict[str, float]:
    """a + c M for a system that starts in turn, by least squares of relative errors."""
    sizes, seconds = np.array(list(SIZES_GB.values())), np.array(COLD_TTFT_S[kind])
    rows = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
    (constant, per_gb), *_ = np.linalg.lstsq(rows, np.ones(len(sizes)))
    worst = np.abs((constant + per_gb * sizes) / seconds - 1).max()
    return {"constant_s": float(constant), "s_per_gb": float(per_gb), "worst_error": float(worst)}


def main() -> None:
    given = points()
    found = fit(given)
    each, out = errors(found, given), left_out(given)
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
            "date": facts.today(),
            "command": ["python", "benchmarks/fleet_cold_ttft.py"],
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
