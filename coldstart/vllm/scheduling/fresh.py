"""Requests without a token since they were admitted or their load began: nobody's victims.

Invariant: all of them together can get their next token at once, because the blocks that each may hold until
then (its pledge) sum to no more than the pool, unless there is only one. So protecting them never deadlocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm.v1.request import Request

if TYPE_CHECKING:
    from coldstart.vllm.scheduling.scheduler import PolicyScheduler


class Fresh:
    """Ids in the order of admission, each with its pledge in blocks."""

    def __init__(self, scheduler: PolicyScheduler) -> None:
        manager = scheduler.kv_cache_manager
        self.capacity: int = manager.block_pool.num_gpu_blocks - 1 - manager.watermark_blocks
        self.pledged = 0
        self._pledges: dict[str, int] = {}
        self._block: int = scheduler.block_size
        self._groups = len(scheduler.kv_cache_config.kv_cache_groups)

    def pledge(self, request: Request) -> int:
        """An upper bound of the blocks the request holds when its next token comes."""
        tokens: int = request.num_tokens
        return self._groups * (tokens // self._block + 2)

    def admits(self, request: Request, besides: int = 0) -> bool:
        """Whether the request may join, `besides` blocks being pledged to others of the same step."""
        if request.request_id in self._pledges:
            return True
        others = self.pledged + besides
        return not others or others + self.pledge(request) <= self.capacity

    def add(self, request: Request) -> None:
        if request.request_id not in self._pledges:
            self._pledges[request.request_id] = self.pledge(request)
            self.pledged += self._pledges[request.request_id]

    def discard(self, request_id: str) -> None:
        self.pledged -= self._pledges.pop(request_id, 0)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pledges

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._pledges))

    def __len__(self) -> int:
        return len(self._pledges)
