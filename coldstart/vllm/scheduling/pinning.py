"""Which chunks the host drops first: those that no live request needs, then by how soon they are needed.

Invariant: a chunk of an evicted request is dropped only when every chunk that may be dropped belongs to one; a
chunk of a live request on the device only when no finished request's chunk is left. Within a kind, the least
recently used goes first, as in vLLM's own policy, whose heap orders by rank: a kind is an offset to the rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

LIVE, AWAY = 1 << 48, 1 << 49


class PinnedLru(LRUCachePolicy):
    """The scheduler tells `left` and `back`; owners come with what the connector stores and finds."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._owned: dict[str, dict[OffloadKey, None]] = {}
        self._owners: dict[OffloadKey, set[str]] = {}
        self._away: set[str] = set()

    def left(self, request_id: str) -> None:
        """The request lost its place on the device: only the host has its KV."""
        self._away.add(request_id)
        self._rerank(self._owned.get(request_id, ()))

    def back(self, request_id: str) -> None:
        """The request holds blocks on the device again, or is gone."""
        if request_id in self._away:
            self._away.discard(request_id)
            self._rerank(self._owned.get(request_id, ()))

    def disown(self, request_id: str, keys: Iterable[OffloadKey]) -> None:
        """The request needs these no more."""
        keys = list(keys)
        for key in keys:
            self._owned.get(request_id, {}).pop(key, None)
            if key in self._owners:
                self._owners[key].discard(request_id)
                if not self._owners[key]:
                    del self._owners[key]
        self._rerank(keys)

    def insert(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        super().insert(key, chunk)
        self._rerank([key])

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        keys = list(keys)
        self._own(keys, req_context.req_id)
        super().touch(keys, req_context)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        self._release(req_context.req_id)
        super().on_request_finished(key_groups, insertion_only_keys, reused_keys, req_context)

    def clear(self) -> None:
        super().clear()
        self._owned.clear()
        self._owners.clear()

    def _own(self, keys: Iterable[OffloadKey], request_id: str) -> None:
        owned = self._owned.setdefault(request_id, {})
        for key in keys:
            owned[key] = None
            self._owners.setdefault(key, set()).add(request_id)

    def _release(self, request_id: str) -> None:
        self._away.discard(request_id)
        self.disown(request_id, self._owned.get(request_id, ()))
        self._owned.pop(request_id, None)

    def _assign_new_rank(self, key: OffloadKey) -> bool:
        evictable: bool = super()._assign_new_rank(key)
        if key in self._ranks:
            self._ranks[key] += self._offset(key)
        return evictable

    def _offset(self, key: OffloadKey) -> int:
        owners = self._owners.get(key)
        if not owners:
            return 0
        return LIVE if owners.isdisjoint(self._away) else AWAY

    def _rerank(self, keys: Iterable[OffloadKey]) -> None:
        """Keep the recency, renew the kind."""
        for key in keys:
            if key in self._ranks:
                self._ranks[key] = self._ranks[key] % LIVE + self._offset(key)
                if key in self._evictable:
                    self._push_evictable(key)
        self._maybe_compact_heap()
