"""Device memory and slots for the picked requests.

Invariants: picked requests get blocks in rank order. Requests are evicted in descending ENST, first from
outside the batch, then from its tail. A request gains a token between two of its evictions. No request is
evicted for one that would still not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import nlargest

from vllm.v1.request import Request

from coldstart.vllm.scheduling.view import RUNNING, EngineView, Enst, State


class Fresh(dict[str, int]):
    """Pledges in blocks by id of the protected requests, in order of admission.

    They have no new token since their admission or since the start of their load. The pledge of a request is the number of
    blocks that it may hold until its next token. The pledges sum to at most the pool, unless there is only one. All protected
    requests can therefore get their next token at once, and never evicting them cannot cause a deadlock.
    """

    def __init__(self, view: EngineView) -> None:
        super().__init__()
        self.pledge, self.pledged = view.bound, 0
        self.capacity = view.capacity - view.watermark

    def admits(self, request: Request, besides: int = 0) -> bool:
        """Return whether the request may join, with `besides` blocks pledged to other requests of the same step."""
        others = self.pledged + besides
        return request.request_id in self or not others or others + self.pledge(request) <= self.capacity

    def add(self, request: Request) -> None:
        if request.request_id not in self:
            self[request.request_id] = pledge = self.pledge(request)
            self.pledged += pledge

    def discard(self, name: str) -> None:
        self.pledged -= self.pop(name, 0)


class Room:
    """Blocks and slots that one step promises.

    `steady` is True if every picked request runs and, by an upper bound, has blocks for its next token. `reserve` is the number
    of blocks to keep free for arrivals. Only requests whose ENST is beyond `horizon_s`, the time of a load, are evicted for it:
    others would be back before an arrival could use their blocks.
    """

    def __init__(self, view: EngineView, fresh: Fresh) -> None:
        self.view, self.fresh, self.needs, self.evict = view, fresh, view.needs, view.evict
        self.steady = False
        self.reserve, self.horizon_s = 0, 0.0
        self.pledged = self._promised = self._joining = 0

    @property
    def free(self) -> int:
        """Return the number of free blocks that are not promised to a picked request."""
        return self.view.free_blocks() - self._promised

    def make(self, picked: list[Request], enst: Enst) -> list[Request]:
        """Evict requests as needed; return the picked requests that fit now, in rank order."""
        view = self.view
        self._forget_promises()
        heavy = view.prefilling(picked)
        joining = [request for request in heavy if request.status is not RUNNING]
        ample = self._ample(picked, heavy, joining, enst)
        self.steady = ample and not heavy and len(picked) <= view.token_budget
        chosen = picked if ample else self._fitted(picked, enst)
        self._keep_reserve(picked, enst)
        return chosen if self.steady else self._within_budget(chosen)

    def fits_next_tokens(self, running: int) -> bool:
        """Return whether each of `running` steady requests has blocks for another token."""
        view = self.view
        return self.steady and 2 * view.groups * running + view.watermark <= view.free_blocks()

    def evictable(self) -> Iterator[Request]:
        kept = {self.view.request(name) for name in self.fresh}
        return (request for request in self.view.list_evictable() if request not in kept)

    def list_victims(self, spared: Iterable[Request], enst: Enst) -> list[Request]:
        """Return the requests that may be evicted, by ascending ENST (estimated next scheduled time)."""
        kept = set(spared)
        return sorted((request for request in self.evictable() if request not in kept), key=enst)

    def choose_victims(self, order: list[Request], short: int, slots: int) -> list[Request]:
        """Return the first requests of `order` whose eviction frees enough; an empty list if all of them free too little.

        Args:
            order: Requests in order of eviction.
            short: Number of blocks to free.
            slots: Number of slots to free.
        """
        for count, blocks in enumerate(self.view.yield_freed(order), 1):
            short -= blocks
            if short <= 0 and count >= slots:
                return order[:count]
        return []

    def _keep_reserve(self, picked: list[Request], enst: Enst) -> None:
        short = self.reserve - self.free
        if short <= 0:
            return
        order = self.list_victims(picked, enst)[::-1]
        for victim, freed in zip(order, list(self.view.yield_freed(order)), strict=True):
            if short <= 0 or enst(victim) <= self.horizon_s:
                return
            self.evict(victim)
            short -= freed

    def _ample(self, picked: list[Request], heavy: list[Request], joining: list[Request], enst: Enst) -> bool:
        """Return whether all requests fit by an upper bound, which avoids a query of the engine for each request."""
        view, fresh = self.view, self.fresh
        pledged = sum(map(fresh.pledge, joining))
        others = (fresh.pledge(request) for request in heavy if request.status is RUNNING)
        bound = 2 * view.groups * (len(picked) - len(heavy)) + pledged + sum(others)
        if bound + view.watermark > self.free or view.speculates:
            return False
        if joining and fresh.pledged + pledged > fresh.capacity:
            return False
        if not self._free_slots_for(len(joining), picked, enst):
            return False
        self._promised, self._joining, self.pledged = bound, len(joining), pledged
        return True

    def _free_slots_for(self, joining: int, picked: list[Request], enst: Enst) -> bool:
        """Evict requests if only slots of the model runner are missing; return whether enough slots are free.

        The requests with the largest ENST are evicted first.
        """
        short = joining - self.view.free_slots()
        if short <= 0:
            return True
        kept = set(picked)
        able = [request for request in self.evictable() if request not in kept]
        for victim in nlargest(short, able, key=enst):
            self.evict(victim)
        return joining <= self.view.free_slots()

    def _fitted(self, picked: list[Request], enst: Enst) -> list[Request]:
        waited = {request for request in picked if request.status is not RUNNING}
        chosen = self._in_order(picked, enst)
        if not picked or picked[0] in chosen:
            return chosen
        leader = self._choose_first(picked[0])
        if leader in chosen:
            return chosen
        self._forget_promises()
        others = [r for r in self._staying(picked, waited) if r is not leader]
        return self._in_order([leader, *others][: self.view.batch], enst)

    def _staying(self, picked: list[Request], waited: set[Request]) -> Iterator[Request]:
        """Yield the requests of the second attempt: no request that the first attempt evicted, and no new one below it."""
        left = False
        for request in picked:
            runs = request.status is RUNNING
            left |= not runs and request not in waited
            if runs or not left:
                yield request

    def _in_order(self, picked: list[Request], enst: Enst) -> list[Request]:
        chosen, later = list[Request](), list(picked)
        victims = self.list_victims(picked, enst)
        while later:
            request = later.pop(0)
            if self._fits(request, later, victims):
                chosen.append(request)
                self._promise(request)
        return chosen

    def _choose_first(self, top: Request) -> Request:
        """Return the request that runs first if requests without a token block the first of the batch.

        Two starved requests could evict each other forever if requests without a token were evicted. One of
        these requests runs instead, preferably one with a slot, and all requests with a token can be evicted
        for it.
        """
        holders = list(map(self.view.request, self.fresh))
        able = [r for r in holders if self.view.can_proceed(r)]
        able += [r for r in holders if self.view.state(r) is State.LOADED]
        return able[0] if able else top

    def _fits(self, request: Request, later: list[Request], victims: list[Request]) -> bool:
        """Return whether the request fits, after evictions if they free enough."""
        joins = request.status is not RUNNING
        if joins and not self.fresh.admits(request, self.pledged):
            return False
        short = self.needs(request) - self.free
        slots = self._joining + 1 - self.view.free_slots() if joins else 0
        if short <= 0 and slots <= 0:
            return True
        able = set(self.evictable())
        order = [*reversed(victims), *(other for other in reversed(later) if other in able)]
        leavers = self.choose_victims(order, short, slots)
        for leaver in leavers:
            self.evict(leaver)
        del victims[max(0, len(victims) - len(leavers)) :]
        cut = min((later.index(leaver) for leaver in leavers if leaver in later), default=len(later))
        # No request joins below a request that was evicted from the batch.
        later[cut:] = [other for other in later[cut:] if other.status is RUNNING]
        return bool(leavers)

    def _forget_promises(self) -> None:
        self.pledged = self._promised = self._joining = 0

    def _promise(self, request: Request) -> None:
        self._promised += self.needs(request)
        if request.status is not RUNNING:
            self._joining += 1
            self.pledged += self.fresh.pledge(request)

    def _within_budget(self, chosen: list[Request]) -> list[Request]:
        """Cut the batch at the token budget: the engine serves running requests first, regardless of their rank."""
        heavy = set(self.view.prefilling(chosen))
        left = self.view.token_budget
        for position, request in enumerate(chosen):
            if left <= 0:
                return chosen[:position]
            left -= self.view.pending(request) if request in heavy or self.view.speculates else 1
        return chosen
