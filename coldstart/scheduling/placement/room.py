"""Memory and slots for the picked requests.

Invariants: blocks go to picked requests in rank order; victims leave in descending ENST, from outside the
batch first, then from its tail; between two evictions a request gains a token; nobody is evicted for a
request that would not fit even then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import nlargest
from typing import Generic

from coldstart.scheduling.placement.fresh import Fresh
from coldstart.scheduling.placement.view import Enst, KvView, R


class Room(Generic[R]):
    """One step's promises. `steady` says that everybody picked runs, and has its next token by a cheap bound."""

    def __init__(self, view: KvView[R], fresh: Fresh[R]) -> None:
        self.view, self.fresh = view, fresh
        self.steady = False
        self.pledged = self._promised = self._joining = 0

    @property
    def free(self) -> int:
        """Blocks that are free and not promised to a picked request."""
        return self.view.free_blocks() - self._promised

    def make(self, picked: list[R], enst: Enst[R]) -> list[R]:
        """Evict what is needed; the picked requests that can be held now, in rank order."""
        view = self.view
        self._forget_promises()
        heavy = view.prefilling(picked)
        joining = [request for request in heavy if not view.runs(request)]
        ample = self._ample(picked, heavy, joining, enst)
        self.steady = ample and not heavy and len(picked) <= view.token_budget
        if self.steady:
            return picked
        return self._within_budget(picked if ample else self._fitted(picked, enst))

    def goes_on(self, running: int) -> bool:
        """Whether so many steady requests have room for another token each."""
        view = self.view
        return self.steady and 2 * view.groups * running + view.watermark <= view.free_blocks()

    def needs(self, request: R) -> int:
        """Further blocks until the request holds all its tokens and the next one."""
        return self.view.needs(request)

    def evictable(self) -> Iterator[R]:
        kept = {self.view.request(name) for name in self.fresh}
        return (request for request in self.view.leavable() if request not in kept)

    def evict(self, request: R) -> None:
        self.view.evict(request)

    def victims(self, spared: Iterable[R], enst: Enst[R]) -> list[R]:
        """Requests that may leave, the largest ENST last."""
        kept = set(spared)
        return sorted((request for request in self.evictable() if request not in kept), key=enst)

    def leavers(self, order: list[R], short: int, slots: int) -> list[R]:
        """The first few whose leaving frees enough blocks and slots; nobody if all of them would not."""
        for count, blocks in enumerate(self.view.freed(order), 1):
            short -= blocks
            if short <= 0 and count >= slots:
                return order[:count]
        return []

    def _ample(self, picked: list[R], heavy: list[R], joining: list[R], enst: Enst[R]) -> bool:
        """Whether everybody fits by a cheap upper bound, which spares asking the engine about each of them."""
        view, fresh = self.view, self.fresh
        pledged = sum(map(fresh.pledge, joining))
        others = (fresh.pledge(request) for request in heavy if view.runs(request))
        bound = 2 * view.groups * (len(picked) - len(heavy)) + pledged + sum(others)
        if bound + view.watermark > self.free or view.speculates:
            return False
        if joining and fresh.pledged + pledged > fresh.capacity:
            return False
        if not self._slots_for(len(joining), picked, enst):
            return False
        self._promised, self._joining, self.pledged = bound, len(joining), pledged
        return True

    def _slots_for(self, joining: int, picked: list[R], enst: Enst[R]) -> bool:
        """Let the largest ENST go where only the model runner's slots are short."""
        short = joining - self.view.free_slots()
        if short <= 0:
            return True
        kept = set(picked)
        able = [request for request in self.evictable() if request not in kept]
        for victim in nlargest(short, able, key=enst):
            self.evict(victim)
        return joining <= self.view.free_slots()

    def _fitted(self, picked: list[R], enst: Enst[R]) -> list[R]:
        waited = {request for request in picked if not self.view.runs(request)}
        chosen = self._in_order(picked, enst)
        if not picked or picked[0] in chosen:
            return chosen
        leader = self._leader(picked[0])
        if leader in chosen:
            return chosen
        self._forget_promises()
        others = [r for r in self._staying(picked, waited) if r is not leader]
        return self._in_order([leader, *others][: self.view.batch], enst)

    def _staying(self, picked: list[R], waited: set[R]) -> Iterator[R]:
        """Who left in the first attempt stays out of this step, and nobody joins below it."""
        left = False
        for request in picked:
            runs = self.view.runs(request)
            left |= not runs and request not in waited
            if runs or not left:
                yield request

    def _in_order(self, picked: list[R], enst: Enst[R]) -> list[R]:
        chosen: list[R] = []
        later = list(picked)
        victims = self.victims(picked, enst)
        while later:
            request = later.pop(0)
            if self._fits(request, later, victims):
                chosen.append(request)
                self._promise(request)
        return chosen

    def _leader(self, top: R) -> R:
        """Who runs first where the top of the batch is kept out by requests without a token.

        Evicting those would let two starved requests evict each other for ever, so one of them runs instead,
        first those that have a slot, and everybody with a token makes way for it.
        """
        holders = list(map(self.view.request, self.fresh))
        able = [r for may in (self.view.proceeds, self.view.landed) for r in holders if may(r)]
        return able[0] if able else top

    def _fits(self, request: R, later: list[R], victims: list[R]) -> bool:
        """Whether the request can be held, once those who make room for it have left."""
        joins = not self.view.runs(request)
        if joins and not self.fresh.admits(request, self.pledged):
            return False
        short = self.needs(request) - self.free
        slots = self._joining + 1 - self.view.free_slots() if joins else 0
        if short <= 0 and slots <= 0:
            return True
        able = set(self.evictable())
        order = [*reversed(victims), *(other for other in reversed(later) if other in able)]
        leavers = self.leavers(order, short, slots)
        for leaver in leavers:
            self.evict(leaver)
        del victims[max(0, len(victims) - len(leavers)) :]
        cut = min((later.index(leaver) for leaver in leavers if leaver in later), default=len(later))
        # Nobody joins below a request that had to leave the batch.
        later[cut:] = [other for other in later[cut:] if self.view.runs(other)]
        return bool(leavers)

    def _forget_promises(self) -> None:
        self.pledged = self._promised = self._joining = 0

    def _promise(self, request: R) -> None:
        self._promised += self.needs(request)
        if not self.view.runs(request):
            self._joining += 1
            self.pledged += self.fresh.pledge(request)

    def _within_budget(self, chosen: list[R]) -> list[R]:
        """Stop where the token budget ends: the engine serves running requests first, whatever their rank."""
        heavy = set(self.view.prefilling(chosen))
        left = self.view.token_budget
        for position, request in enumerate(chosen):
            if left <= 0:
                return chosen[:position]
            left -= self.view.pending(request) if request in heavy or self.view.speculates else 1
        return chosen
