"""Offline optimum of a trace: a feasible plan, and a bound that no policy exceeds.

Between two requests of one model its bytes are retained (which saves P) or not. Let x_i in {0, 1} for
each such interval i.

Maximise sum P_i x_i  subject to  sum over i across request t of S_i x_i <= C - S(model of t), for every t.

Bound: for any prices l >= 0 the dual sum max(0, P_i - S_i sum l) + sum l_t (C - S_t) is at least that optimum. So no
policy that loads on demand saves more (the relaxation behind Berger et al., SIGMETRICS 2018, with penalties). Plan:
intervals by penalty over price, each retained if it still fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coldstart.host.policies.protocol import Costs

ITERATIONS = 400

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Offline:
    """Offline solution.

    `bound_s`: lower bound of the cost of misses. `plan_s`: the cost of the plan.
    """

    bound_s: float
    plan_s: float


def solve(requests: Sequence[str], costs: Costs, capacity: int) -> Offline:
    """Solve a trace of models in order of arrival. Every model must fit the capacity alone."""
    problem = _Intervals(requests, costs, capacity)
    total = sum(costs[model].penalty_s for model in requests)
    if not len(problem.start):
        return Offline(total, total)
    bound, prices = problem.prices()
    kept = problem.packed(prices)
    saved = float(problem.penalty[kept].sum())
    return Offline(total - bound, total - saved)


class _Intervals:
    """Intervals from each request to the next of its model; sizes as fractions of the capacity."""

    def __init__(self, requests: Sequence[str], costs: Costs, capacity: int) -> None:
        self.start, self.end = np.array(list(_pairs(requests)), dtype=np.intp).reshape(-1, 2).T
        names = [requests[start] for start in self.start]
        self.penalty = np.array([costs[name].penalty_s for name in names])
        self.size = np.array([costs[name].memory for name in names]) / capacity
        self.room = 1 - np.array([costs[name].memory for name in requests]) / capacity

    def price(self, prices: Floats) -> Floats:
        """Return the price of retaining each interval: the cost of its bytes at the requests in between."""
        total = np.concatenate(([0.0], np.cumsum(prices)))
        found: Floats = (total[self.end] - total[self.start + 1]) * self.size
        return found

    def prices(self) -> tuple[float, Floats]:
        """Return the smallest dual value found by subgradient steps, and its prices."""
        prices = np.zeros(len(self.room))
        best, chosen = float("inf"), prices
        for step in range(ITERATIONS):
            won = self.penalty - self.price(prices)
            value = float(won[won > 0].sum() + prices @ self.room)
            if value < best:
                best, chosen = value, prices
            over = self._used(won > 0) - self.room
            scale = self.penalty.sum() / len(prices) / (np.sqrt((over**2).mean()) + 1e-9)
            prices = np.maximum(0.0, prices + 0.1 * scale / (1 + step / 5) * over)
        return best, chosen

    def _used(self, kept: NDArray[np.bool_]) -> Floats:
        change = np.zeros(len(self.room) + 1)
        np.add.at(change, self.start[kept] + 1, self.size[kept])
        np.add.at(change, self.end[kept], -self.size[kept])
        return np.cumsum(change)[:-1]

    def packed(self, prices: Floats) -> NDArray[np.intp]:
        """Return the indices of the retained intervals, chosen greedily."""
        used, kept = np.zeros(len(self.room)), []
        worth = self.penalty / (self.price(prices) + 1e-6 * self.size * (self.end - self.start))
        for i in np.argsort(-worth):
            across = slice(self.start[i] + 1, self.end[i])
            if np.all(used[across] + self.size[i] <= self.room[across] + 1e-12):
                used[across] += self.size[i]
                kept.append(i)
        return np.array(kept, dtype=np.intp)


def _pairs(requests: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the index of each request and that of the next request of its model."""
    latest: dict[str, int] = {}
    for index, model in enumerate(requests):
        if model in latest:
            yield latest[model], index
        latest[model] = index
