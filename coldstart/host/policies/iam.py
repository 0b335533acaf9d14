"""IAM as published (mCache, section 4.3, Algorithm 1): importance, its log-rank, and a min-heap rebuilt in the background.

Equations: utility_i = P_i / S_i / T_i (1), T_i = 1 / rate, "via a sliding-window or exponentially weighted moving average"
(4.3.2), of which this module uses the latter; rank_i = log(|{j cached: u_j < u_i}| + b0) (2).

Algorithm 1: line 3 ranks a model when it is requested, before any evictions for it. A hit changes no rank (line 5). Lines
11 to 16 evict the model with the smallest rank until the new model fits. Lines 9 and 18 insert its rank. "After importance
updates, the IQ becomes read-only and is utilized only for eviction, while changes are recorded in the shadow cache"
(4.3.3): models loaded during a rebuild are added only to the shadow, so they are evicted only if the models in the queue do
not suffice. The log-rank grows with the utility, so it does not change which model is evicted, but the age of a rank does.
The paper specifies no period, weights or b0, so UPDATE_S, REBUILD_S, SMOOTHING and BIAS are this project's values. The
rebuild takes simulated time instead of a thread.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heapify, heappush
from math import inf, log

from coldstart.host.policies.protocol import Costs, take_first

UPDATE_S, REBUILD_S = 10.0, 1.0
SMOOTHING, BIAS = 0.2, 1.0
UNKNOWN_RATE = 1e-9
"""Requests per second of a model that has been requested once. Such models are ordered by P/S."""

Entry = tuple[float, int, str]
"""Rank, order of entry, model."""


class ImportancePolicy:
    """Eviction policy that evicts the least important models first (mCache, Algorithm 1)."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._latest: dict[str, float] = {}
        self._gap: dict[str, float] = {}
        self._cached: set[str] = set()
        self._queue: list[Entry] = []
        self._shadow: list[Entry] | None = None
        self._requested: dict[str, float] = {}
        self._entered, self._ready_at, self._next_update = 0, inf, 0.0

    def record_request(self, model: str, now: float, resident: bool) -> None:
        if model in self._latest:
            gap = max(1e-3, now - self._latest[model])
            self._gap[model] = gap + (1 - SMOOTHING) * (self._gap.get(model, gap) - gap)
        self._latest[model] = now
        self._update(now)
        if not resident:
            self._requested[model] = self._rank(model)

    def utility(self, model: str) -> float:
        """Return the utility of a model (mCache, equation 1): the seconds lost per byte freed, times the request rate."""
        rate = 1 / self._gap[model] if model in self._gap else UNKNOWN_RATE
        return self.costs[model].density * rate

    def record_load_start(self, model: str, now: float) -> None:
        rank = self._requested.pop(model, None)
        # A pinned model may be loaded without a request.
        rank = self._rank(model) if rank is None else rank
        self._cached.add(model)
        self._entered += 1
        into = self._queue if self._shadow is None else self._shadow
        heappush(into, (rank, self._entered, model))

    def record_eviction(self, model: str, now: float) -> None:
        self._cached.discard(model)
        self._queue = _remove_model(self._queue, model)
        self._shadow = None if self._shadow is None else _remove_model(self._shadow, model)

    def choose_victims(self, free: Collection[str], need: int, now: float) -> Sequence[str]:
        members, queued = set(free), {model for _, _, model in self._queue}
        late = [entry for entry in self._shadow or () if entry[2] not in queued]
        # Sorting a heap gives the order in which its entries would be popped.
        order = [*sorted(self._queue), *sorted(late)]
        return take_first((model for _, _, model in order if model in members), need, self.costs)

    def _update(self, now: float) -> None:
        if self._shadow is not None and now >= self._ready_at:
            self._queue, self._shadow = self._shadow, None
            self._next_update = self._ready_at + UPDATE_S
        if self._shadow is None and now >= self._next_update:
            self._shadow, self._ready_at = self._build_ranked_heap(), now + REBUILD_S

    def _build_ranked_heap(self) -> list[Entry]:
        found = []
        for model in sorted(self._cached):
            self._entered += 1
            found.append((self._rank(model), self._entered, model))
        heapify(found)
        return found

    def _rank(self, model: str) -> float:
        """Return the log-rank of a model (equation 2)."""
        own = self.utility(model)
        return log(sum(self.utility(other) < own for other in self._cached) + BIAS)


def _remove_model(heap: list[Entry], model: str) -> list[Entry]:
    kept = [entry for entry in heap if entry[2] != model]
    heapify(kept)
    return kept
