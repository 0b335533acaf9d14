"""Allocate KV blocks and model runner slots to the picked requests.

Invariants: picked requests get blocks in rank order. Requests outside the batch are evicted first, in descending ENST,
and then requests at the end of the batch. A request generates at least one token between two of its evictions. No
request is evicted for a request that would still not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import nlargest

from vllm.v1.request import Request

from coldstart.vllm.scheduling.view import RUNNING, EngineView, Enst, KvState


class ProtectedRequests(dict[str, int]):
    """Blocks pledged to protected requests, by request ID in order of admission.

    A request is protected from eviction from its admission or load until it generates a token. Its pledge is the number
    of blocks that it may need until then. If several requests are protected, their pledges add up to at most the pool
    size. So all of them can generate their next token, and protection cannot cause a deadlock.
    """

    def __init__(self, view: EngineView) -> None:
        super().__init__()
        self.pledge, self.pledged = view.compute_max_blocks, 0
        self.capacity = view.capacity - view.watermark

    def can_protect(self, request: Request, other_pledged_blocks: int = 0) -> bool:
        """Return whether the request may be protected. `other_pledged_blocks` is pledged to other requests in this step."""
        others = self.pledged + other_pledged_blocks
        return request.request_id in self or not others or others + self.pledge(request) <= self.capacity

    def add(self, request: Request) -> None:
        if request.request_id not in self:
            self[request.request_id] = pledge = self.pledge(request)
            self.pledged += pledge

    def discard(self, name: str) -> None:
        self.pledged -= self.pop(name, 0)


class KvAllocator:
    """Allocator of KV blocks and slots for one step.

    `steady` is True if every picked request is running and has, by an upper bound, blocks for its next token. `reserve`
    is the number of blocks to keep free for arrivals. Only requests whose ENST is above `horizon_s`, the duration of a
    load, are evicted for the reserve: other requests would return before an arrival could use their blocks.
    """

    def __init__(self, view: EngineView, fresh: ProtectedRequests) -> None:
        self.view, self.fresh, self.needs, self.evict = view, fresh, view.count_needed_blocks, view.evict
        self.steady = False
        self.reserve, self.horizon_s = 0, 0.0
        self.pledged = self._promised = self._joining = 0

    @property
    def free_blocks(self) -> int:
        """Return the number of free blocks that are not reserved for a picked request."""
        return self.view.free_blocks() - self._promised

    def allocate(self, picked: list[Request], enst: Enst) -> list[Request]:
        """Return the picked requests that fit now, in rank order. Evict other requests as needed."""
        view = self.view
        self._forget_promises()
        heavy = view.list_prefilling(picked)
        joining = [request for request in heavy if request.status is not RUNNING]
        fits_by_bound = self._fits_by_bound(picked, heavy, joining, enst)
        self.steady = fits_by_bound and not heavy and len(picked) <= view.token_budget
        chosen = picked if fits_by_bound else self._allocate(picked, enst)
        self._keep_reserve(picked, enst)
        return chosen if self.steady else self._within_budget(chosen)

    def fits_next_tokens(self, running: int) -> bool:
        """Return whether the last allocation was steady and each of `running` requests has blocks for another token."""
        view = self.view
        return self.steady and 2 * view.groups * running + view.watermark <= view.free_blocks()

    def list_evictable(self) -> Iterator[Request]:
        kept = {self.view.request(name) for name in self.fresh}
        return (request for request in self.view.list_evictable() if request not in kept)

    def list_victims(self, spared: Iterable[Request], enst: Enst) -> list[Request]:
        """Return the evictable requests except `spared`, in ascending ENST (estimated next scheduled time)."""
        kept = set(spared)
        return sorted((request for request in self.list_evictable() if request not in kept), key=enst)

    def choose_victims(self, order: list[Request], short: int, slots: int) -> list[Request]:
        """Return the fewest requests, from the start of `order`, whose eviction frees enough, or none if no number is enough.

        Args:
            order: Requests in order of eviction.
            short: Number of blocks to free.
            slots: Number of slots to free.
        """
        for count, blocks in enumerate(self.view.iterate_freed_blocks(order), 1):
            short -= blocks
            if short <= 0 and count >= slots:
                return order[:count]
        return []

    def _keep_reserve(self, picked: list[Request], enst: Enst) -> None:
        short = self.reserve - self.free_blocks
        if short <= 0:
            return
        order = self.list_victims(picked, enst)[::-1]
        for victim, freed in zip(order, list(self.view.iterate_freed_blocks(order)), strict=True):
            if short <= 0 or enst(victim) <= self.horizon_s:
                return
            self.evict(victim)
            short -= freed

    def _fits_by_bound(
        self, picked: list[Request], heavy: list[Request], joining: list[Request], enst: Enst
    ) -> bool:
        """Return whether all requests fit by an upper bound, which avoids querying the engine for each request."""
        view, fresh = self.view, self.fresh
        pledged = sum(map(fresh.pledge, joining))
        others = (fresh.pledge(request) for request in heavy if request.status is RUNNING)
        bound = 2 * view.groups * (len(picked) - len(heavy)) + pledged + sum(others)
        if bound + view.watermark > self.free_blocks or view.speculates:
            return False
        if joining and fresh.pledged + pledged > fresh.capacity:
            return False
        if not self._free_slots_for(len(joining), picked, enst):
            return False
        self._promised, self._joining, self.pledged = bound, len(joining), pledged
        return True

    def _free_slots_for(self, joining: int, picked: list[Request], enst: Enst) -> bool:
        """Free slots of the model runner by evicting requests, largest ENST first. Return whether enough slots are free."""
        short = joining - self.view.count_free_slots()
        if short <= 0:
            return True
        kept = set(picked)
        candidates = [request for request in self.list_evictable() if request not in kept]
        for victim in nlargest(short, candidates, key=enst):
            self.evict(victim)
        return joining <= self.view.count_free_slots()

    def _allocate(self, picked: list[Request], enst: Enst) -> list[Request]:
        waited = {request for request in picked if request.status is not RUNNING}
        chosen = self._allocate_in_order(picked, enst)
        if not picked or picked[0] in chosen:
            return chosen
        leader = self._choose_first(picked[0])
        if leader in chosen:
            return chosen
        self._forget_promises()
        others = [r for r in self._list_retry(picked, waited) if r is not leader]
        together = list(self.view.limit_adapters([leader, *others]))
        return self._allocate_in_order(together[: self.view.batch], enst)

    def _list_retry(self, picked: list[Request], waited: set[Request]) -> Iterator[Request]:
        """Yield the requests in `picked` that run, and those in `waited` that rank above the first evicted request."""
        left = False
        for request in picked:
            runs = request.status is RUNNING
            left |= not runs and request not in waited
            if runs or not left:
                yield request

    def _allocate_in_order(self, picked: list[Request], enst: Enst) -> list[Request]:
        chosen, later = list[Request](), list(picked)
        victims = self.list_victims(picked, enst)
        while later:
            request = later.pop(0)
            if self._fits(request, later, victims):
                chosen.append(request)
                self._promise(request)
        return chosen

    def _choose_first(self, top: Request) -> Request:
        """Return the request to run first if protected requests block the first request in the batch.

        Two starved requests could evict each other forever if protected requests could be evicted. A protected request
        runs instead, preferably one with a slot, and all unprotected requests can be evicted for it.
        """
        holders = list(map(self.view.request, self.fresh))
        candidates = [r for r in holders if self.view.can_proceed(r)]
        candidates += [r for r in holders if self.view.get_kv_state(r) is KvState.LOADED]
        return candidates[0] if candidates else top

    def _fits(self, request: Request, later: list[Request], victims: list[Request]) -> bool:
        """Return whether the request fits. Evict other requests if that frees enough."""
        joins = request.status is not RUNNING
        if joins and not self.fresh.can_protect(request, self.pledged):
            return False
        short = self.needs(request) - self.free_blocks
        slots = self._joining + 1 - self.view.count_free_slots() if joins else 0
        if short <= 0 and slots <= 0:
            return True
        candidates = set(self.list_evictable())
        order = [*reversed(victims), *(other for other in reversed(later) if other in candidates)]
        evicted = self.choose_victims(order, short, slots)
        for evicted_request in evicted:
            self.evict(evicted_request)
        del victims[max(0, len(victims) - len(evicted)) :]
        cut = next((index for index, other in enumerate(later) if other in evicted), len(later))
        # No request may join that ranks below a request evicted from the batch.
        later[cut:] = [other for other in later[cut:] if other.status is RUNNING]
        return bool(evicted)

    def _forget_promises(self) -> None:
        self.pledged = self._promised = self._joining = 0

    def _promise(self, request: Request) -> None:
        self._promised += self.needs(request)
        if request.status is not RUNNING:
            self._joining += 1
            self.pledged += self.fresh.pledge(request)

    def _within_budget(self, chosen: list[Request]) -> list[Request]:
        """Truncate the batch at the token budget, because the engine serves running requests first, whatever their rank."""
        heavy = set(chosen if self.view.speculates else self.view.list_prefilling(chosen))
        left = self.view.token_budget
        limit = self.view.compute_chunk_limit(sum(request.status is RUNNING for request in chosen))
        for position, request in enumerate(chosen):
            if left <= 0:
                return chosen[:position]
            left -= self.view.count_chunk_tokens(request, limit) if request in heavy else 1
        return chosen
