"""ARC with sizes in bytes instead of counts (Megiddo and Modha, FAST 2003).

Invariant: T1 and T2 are the resident models that were used once and more than once; B1 and B2 are the ghost lists of
models evicted from them; |T1| + |B1| <= c and |T1| + |T2| + |B1| + |B2| <= 2c in bytes, c the capacity. p is the
target of |T1|.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from coldstart.host.policies.protocol import Costs


class _Bytes(dict[str, int]):
    """Bytes of models, oldest first, with their sum."""

    total = 0

    def put(self, model: str, size: int) -> None:
        self.drop(model)
        self[model] = size
        self.total += size

    def drop(self, model: str) -> bool:
        held = model in self
        self.total -= self.pop(model, 0)
        return held

    def drop_oldest(self) -> None:
        self.drop(next(iter(self)))


class ARC:
    """ARC policy: balances recency against frequency by the hits in the two ghost lists."""

    def __init__(self, costs: Costs, capacity: int) -> None:
        self.costs, self._capacity = costs, capacity
        self._once, self._often = _Bytes(), _Bytes()
        self._once_ghosts, self._often_ghosts = _Bytes(), _Bytes()
        self._target, self._returning = 0.0, set[str]()
        self._latest_was_often = False

    def requested(self, model: str, now: float, resident: bool) -> None:
        self._latest_was_often = False
        if resident:
            self._promote(model)
        elif model in self._once_ghosts:
            self._adapt(model, self._once_ghosts, self._often_ghosts, 1)
        elif model in self._often_ghosts:
            self._latest_was_often = True
            self._adapt(model, self._often_ghosts, self._once_ghosts, -1)

    def _promote(self, model: str) -> None:
        if self._once.drop(model) or self._often.drop(model):
            self._often.put(model, self.costs[model].memory)

    def _adapt(self, model: str, own: _Bytes, other: _Bytes, sign: int) -> None:
        """Adapt p (cases II and III) by the ratio of the two ghost lists, at least by the model's own size."""
        step = self.costs[model].memory * max(1.0, other.total / own.total)
        self._target = min(float(self._capacity), max(0.0, self._target + sign * step))
        own.drop(model)
        self._returning.add(model)

    def loaded(self, model: str, now: float) -> None:
        into = self._often if model in self._returning else self._once
        self._returning.discard(model)
        into.put(model, self.costs[model].memory)
        while self._once.total + self._once_ghosts.total > self._capacity and self._once_ghosts:
            self._once_ghosts.drop_oldest()
        while self._all() > 2 * self._capacity and self._often_ghosts:
            self._often_ghosts.drop_oldest()

    def _all(self) -> int:
        lists = (self._once, self._often, self._once_ghosts, self._often_ghosts)
        return sum(one.total for one in lists)

    def evicted(self, model: str, now: float) -> None:
        size = self.costs[model].memory
        if self._once.drop(model):
            self._once_ghosts.put(model, size)
        elif self._often.drop(model):
            self._often_ghosts.put(model, size)

    def victims(self, free: Collection[str], need: int, now: float) -> Sequence[str]:
        """Return the victims of REPLACE, repeated until the bytes suffice."""
        members, left = set(free), self._once.total
        once = [model for model in self._once if model in members][::-1]
        often = [model for model in self._often if model in members][::-1]
        chosen: list[str] = []
        while need > 0 and (once or often):
            from_once = bool(once) and (self._over_target(left) or not often)
            chosen.append((once if from_once else often).pop())
            size = self.costs[chosen[-1]].memory
            left -= size * from_once
            need -= size
        return chosen

    def _over_target(self, once: int) -> bool:
        return once > self._target or (self._latest_was_often and once == self._target)
