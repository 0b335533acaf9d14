"""What the lane measures of the engine: how contended it is, the lane's share of that, and what the lane asks for.

Equations: share_X = max(slots of X / B where all are taken, blocks of X / capacity); memory binds above 0.8 of the pool; the
main lane leaves free what the lane asks for just now, which with what it holds is price * capacity at most.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic

from coldstart.scheduling.express.index import Pressure
from coldstart.scheduling.express.policy import Express
from coldstart.scheduling.express.view import LaneView
from coldstart.scheduling.placement.view import R

BINDS = 0.8
"""Of the pool, in use: above it memory is what requests compete for."""

LOAD_STEPS = 3.0
"""Iterations that a load costs who waits for it: stores under way are reported, the copies land, a step admits."""

FEWEST = 4
"""The least batch that costs are worked out for, and who may be in the lane at least."""

LEARN_STEPS, LEARN_TOKENS = 1.6, 25
"""Between two tables at least, for each completion that it takes to trust lengths: a large batch ends several requests a
step, and a small one's steps are short.
"""

_SLOW = 0.02


class Gauge(Generic[R]):
    """Moving means over steps; names are those of the lane's members."""

    def __init__(self, view: LaneView[R], policy: Express, *, keeps_kv: bool) -> None:
        self.view, self.policy, self.keeps_kv = view, policy, keeps_kv
        self.context = 1.0
        self._steps = self._tokens = 0

    def share(self, members: Iterable[str]) -> float:
        """The members' share of what binds."""
        names = list(members)
        if not names:
            return 0.0
        view = self.view
        running = len(view.running())
        slots = len(names) / running if running >= view.batch else 0.0
        return min(1.0, max(slots, self.used(names) / view.capacity))

    def used(self, members: Iterable[str]) -> int:
        """Blocks that the members hold."""
        return sum(self.view.held(self.view.request(name)) for name in members)

    def learn(self, hidden: int, steps: int) -> None:
        """Bring indices up to date; `hidden` requests hold KV and are not shown, `steps` have passed since."""
        view = self.view
        running = view.running()
        used = view.capacity - view.free_blocks()
        if running:
            share = 1 - (1 - _SLOW) ** steps
            self.context += share * (used * view.block_tokens / (len(running) + hidden) - self.context)
        self._steps, self._tokens = self._steps + steps, self._tokens + steps * len(running)
        trust = self.policy.lengths.trust
        early = self._steps < LEARN_STEPS * trust or self._tokens < LEARN_TOKENS * trust
        if early and not self.policy.index.unborn:
            return
        self._steps = self._tokens = 0
        pressure = Pressure(
            max(FEWEST, min(view.batch, len(running))),
            used > BINDS * view.capacity,
            max(1.0, self.context),
            self.policy.prompt,
            view.block_tokens // 2 if self.keeps_kv else None,
        )
        self.policy.learn(pressure, (view.job(request).generated for request in running))

    def kept(self, members: Iterable[str], asked: Iterable[int]) -> int:
        """Blocks that the main lane leaves to the lane beyond what its members hold, where so many each are asked for besides.

        Nothing is kept for who may yet come: what lies idle makes the batch smaller, which no ledger books.
        """
        used, most = self.used(members), self.policy.ledger.price * self.view.capacity
        return max(0, int(min(used + sum(asked), most) + 0.5) - used)

    def worth_loading(self, tokens: int) -> bool:
        """Whether to bring that much context back from the host instead of computing it again."""
        index = self.policy.index
        again_s = index.profile.prefill(tokens) - index.profile.shortest_s
        return again_s > LOAD_STEPS * index.profile.decode(index.pressure.batch)
