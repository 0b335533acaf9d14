"""Eviction order of the host's KV cache: chunks that no live request needs first, then by how soon they are needed.

Invariant: a chunk of an evicted request is dropped only if every evictable chunk belongs to one. A chunk of a live request on
the device is dropped only if no chunk of a finished request is left. Within a class, the least recently used chunk
is dropped first, as in vLLM's policy, whose heap orders by rank. A class is an offset to the rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

LIVE, AWAY = 1 << 48, 1 << 49


class PinnedLru(LRUCachePolicy):
    """vLLM's LRU policy, which drops all chunks of one class before those of the next.

    The scheduler calls `record_eviction` and `back`. Stores and hits set the owners of a chunk.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._owned: dict[str, dict[OffloadKey, None]] = {}
        self._owners: dict[OffloadKey, set[str]] = {}
        self._away: set[str] = set()

    def record_eviction(self, request_id: str) -> None:
        """Record that the request was evicted from the device, so that only the host has its KV."""
        self._away.add(request_id)
        self._rerank(self._owned.get(request_id, ()))

    def back(self, request_id: str) -> None:
        """Record that the request has blocks on the device again, or has finished."""
        if request_id in self._away:
            self._away.discard(request_id)
            self._rerank(self._owned.get(request_id, ()))

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
        owned = self._owned.pop(request_id, {})
        for key in owned:
            self._owners[key].discard(request_id)
            if not self._owners[key]:
                del self._owners[key]
        self._rerank(owned)

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
        """Update the class of each chunk, and keep its recency."""
        for key in keys:
            if key in self._ranks:
                self._ranks[key] = self._ranks[key] % LIVE + self._offset(key)
                if key in self._evictable:
                    self._push_evictable(key)
        self._maybe_compact_heap()
