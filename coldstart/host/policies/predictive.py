"""Predictive policy: the value of a model is its penalty times the rate of its next request.

Equation: value per byte = P/S * h(a), where h is the hazard of the next request and a is the time since the latest one.
Gaps between requests follow a mixture of Lomax laws (Poisson arrivals of an unknown rate, gamma prior), one for each
forgetting factor k:

S_k(a) = (b_k / (b_k + a))^a_k;  h(a) = sum w_k S_k(a) a_k / (b_k + a) / sum w_k S_k(a);
a_k = PRIOR + requests, b_k = PRIOR * g + their gaps; both times k at each request; g is the mean gap of one model.

The weights w are learned by online expectation maximization from the share of all gaps that each law explains best. Laws
that forget follow a drifting load, and laws that remember follow a steady load. No constant has a unit of time.

If there are few large models, plain density order frees more memory than needed. Therefore the set of victims minimizes the
sum of V_i - credit * d* * excess, V_i = d_i * S_i, subject to sum S_i >= need. d* is the density of the first model that
the plain order would keep. The excess is the bytes freed beyond the need, which save a later eviction of about that price.
Written as sum (d_i - credit * d*) * S_i, this is a knapsack cover problem.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from coldstart.host.policies.protocol import Costs

SEEDS = 12
"""Number of candidate sets. If the density order needs more victims than this, it is used unchanged."""

Item = tuple[float, int, str]
"""Density in seconds lost per byte (and second), size in bytes, model."""


def find_cheapest_victims(items: Sequence[Item], need: int, credit: float) -> list[str]:
    """Return the cheapest set of models that together use at least `need` bytes, or all models if they use less.

    For each of the first SEEDS models in ascending order of density, the search adds further models in this order until
    the set is large enough, and then removes models that are not needed.
    """
    ranked = sorted(items)
    count = _count_needed(ranked, need)
    if count is None:
        return [model for _, _, model in ranked]
    price = credit * ranked[min(count, len(ranked) - 1)][0]
    seeds = ranked[:SEEDS] if count <= SEEDS else ranked[:1]
    sets = (_remove_unneeded(_complete_set(seed, ranked, need), need, price) for seed in seeds)
    least = min(sets, key=lambda chosen: sum((density - price) * size for density, size, _ in chosen))
    return [model for _, _, model in least]


def _count_needed(ranked: Sequence[Item], need: int) -> int | None:
    for count, (_, size, _) in enumerate(ranked, start=1):
        need -= size
        if need <= 0:
            return count
    return None


def _complete_set(seed: Item, ranked: Sequence[Item], need: int) -> list[Item]:
    chosen, held = [seed], seed[1]
    for item in ranked:
        if held >= need:
            break
        if item is not seed:
            chosen.append(item)
            held += item[1]
    return chosen


def _remove_unneeded(chosen: list[Item], need: int, price: float) -> list[Item]:
    """Return `chosen` without the models that are not needed to free `need` bytes and whose density exceeds `price`."""
    spare = sum(size for _, size, _ in chosen) - need
    for item in sorted(chosen, key=lambda item: (price - item[0]) * item[1]):
        if item[1] <= spare and item[0] > price:
            chosen.remove(item)
            spare -= item[1]
    return chosen


KEEP = np.array([0.7, 0.9, 0.97, 0.995])
"""Forgetting factor of each law per request, which gives memories of about 3, 10, 30 and 200 requests."""
PRIOR = 1.0
"""Weight of the prior, in requests."""
LEARNING = 0.01
"""Learning rate of the mixture weights, per request."""
CREDIT = 0.25
"""Credit for bytes freed beyond the need, as a fraction of their price."""
TEMPO = 0.002
"""Learning rate, per request, of the mean time between the requests of all models."""

Floats = NDArray[np.float64]


class PredictivePolicy:
    """Eviction policy that minimizes the expected cost of restarting the evicted models."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._rows: dict[str, int] = {}
        self._count, self._span = np.zeros((16, len(KEEP))), np.zeros((16, len(KEEP)))
        self._latest = np.zeros(16)
        self._weights = np.full(len(KEEP), 1 / len(KEEP))
        self._requests, self._between, self._now = 0, 0.0, 0.0

    def record_request(self, model: str, now: float, resident: bool) -> None:
        self._update_interarrival(now)
        if model not in self._rows:
            self._get_or_add_row(model, now)
            return
        row = self._rows[model]
        gap = now - self._latest[row]
        self._learn(self._count[row] + PRIOR, self._span[row] + self._prior_span(), gap)
        self._count[row] = self._count[row] * KEEP + 1
        self._span[row] = self._span[row] * KEEP + gap
        self._latest[row] = now

    def record_load_start(self, model: str, now: float) -> None:
        self._get_or_add_row(model, now)

    def record_eviction(self, model: str, now: float) -> None:
        """Do nothing, because the model's request history still predicts its next request."""

    def choose_victims(self, free: Collection[str], need: int, now: float) -> Sequence[str]:
        names = list(free)
        costs = [self.costs[name] for name in names]
        sizes = np.array([cost.memory for cost in costs])
        values = self.hazard(names, now) * np.array([cost.penalty_s for cost in costs]) / sizes
        order = np.argsort(values, kind="stable")
        enough = int(np.searchsorted(np.cumsum(sizes[order]), need)) + 1
        items = [(float(values[i]), int(sizes[i]), names[i]) for i in order[: enough + SEEDS]]
        return find_cheapest_victims(items, need, CREDIT)

    def hazard(self, names: Sequence[str], now: float) -> Floats:
        """Return the hazard h of each model's next request, in requests per second (see the module docstring)."""
        rows = np.array([self._rows[name] for name in names], dtype=np.intp)
        age = np.maximum(0.0, now - self._latest[rows])[:, None]
        a, b = self._count[rows] + PRIOR, self._span[rows] + self._prior_span()
        return _hazard(self._weights, a, b, age)

    def _update_interarrival(self, now: float) -> None:
        if self._requests:
            step = max(1 / self._requests, TEMPO)
            self._between += step * (now - self._now - self._between)
        self._requests, self._now = self._requests + 1, now

    def _prior_span(self) -> float:
        """Return PRIOR times the mean gap of one model in seconds: the mean gap of all requests times the number of models."""
        return PRIOR * max(1e-3, self._between * len(self._rows))

    def _learn(self, a: Floats, b: Floats, gap: float) -> None:
        likelihood = self._weights * a / (b + gap) * np.exp(a * np.log(b / (b + gap)))
        total = likelihood.sum()
        if total > 0:
            self._weights += LEARNING * (likelihood / total - self._weights)

    def _get_or_add_row(self, model: str, now: float) -> int:
        row = self._rows.get(model)
        if row is None:
            row = self._rows[model] = len(self._rows)
            if row == len(self._latest):
                self._grow()
            self._latest[row] = now
        return row

    def _grow(self) -> None:
        self._count, self._span = (np.vstack((one, np.zeros_like(one))) for one in (self._count, self._span))
        self._latest = np.concatenate((self._latest, np.zeros_like(self._latest)))


def _hazard(weights: Floats, a: Floats, b: Floats, age: Floats) -> Floats:
    """Return the hazard of the mixture for each model. `a` and `b` are models x laws, and `age` is models x 1 in seconds."""
    log = np.log(weights + 1e-12) + a * np.log(b / (b + age))
    share = np.exp(log - log.max(axis=1, keepdims=True))
    found: Floats = (share * a / (b + age)).sum(axis=1) / share.sum(axis=1)
    return found
