"""Choice of a set of models to evict: with few large models, plain density order frees more memory than needed.

Equation: minimise sum over the set of V_i - credit * d* * excess, V_i = d_i * S_i, subject to sum S_i >= need. d* is
the density of the first model that the plain order would retain; excess are the bytes freed beyond the need, which
save a later eviction of about that price. Written as sum (d_i - credit * d*) * S_i it is a knapsack cover.
"""

from __future__ import annotations

from collections.abc import Sequence

SEEDS = 12
"""Number of sets to try; if the plain order has more victims than this, it is good enough."""

Item = tuple[float, int, str]
"""Density in seconds lost per byte (and second), size in bytes, model."""


def least_loss(items: Sequence[Item], need: int, credit: float) -> list[str]:
    """Return the models of the cheapest set found, or all models if they hold less than `need` bytes together.

    The candidates are the density order completed after each of its first models, without models that are not needed.
    """
    ranked = sorted(items)
    count = _head(ranked, need)
    if count is None:
        return [model for _, _, model in ranked]
    price = credit * ranked[min(count, len(ranked) - 1)][0]
    seeds = ranked[:SEEDS] if count <= SEEDS else ranked[:1]
    sets = (_pruned(_completed(seed, ranked, need), need, price) for seed in seeds)
    return [model for _, _, model in min(sets, key=lambda chosen: _loss(chosen, price))]


def _head(ranked: Sequence[Item], need: int) -> int | None:
    """Return how many items from the front hold `need` bytes; None if all hold less."""
    for count, (_, size, _) in enumerate(ranked, start=1):
        need -= size
        if need <= 0:
            return count
    return None


def _completed(seed: Item, ranked: Sequence[Item], need: int) -> list[Item]:
    chosen, held = [seed], seed[1]
    for item in ranked:
        if held >= need:
            break
        if item is not seed:
            chosen.append(item)
            held += item[1]
    return chosen


def _pruned(chosen: list[Item], need: int, price: float) -> list[Item]:
    """Remove models that cost something and are not needed, the most expensive first."""
    spare = sum(size for _, size, _ in chosen) - need
    for item in sorted(chosen, key=lambda item: (price - item[0]) * item[1]):
        if item[1] <= spare and item[0] > price:
            chosen.remove(item)
            spare -= item[1]
    return chosen


def _loss(chosen: Sequence[Item], price: float) -> float:
    return sum((density - price) * size for density, size, _ in chosen)
