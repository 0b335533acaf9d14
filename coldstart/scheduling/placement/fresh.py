"""Requests without a token since they were admitted or their load began: nobody's victims.

Invariant: all of them together can get their next token at once, because the blocks that each may hold until
then (its pledge) sum to no more than the pool, unless there is only one. So protecting them never deadlocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic

from coldstart.scheduling.placement.view import KvView, R


class Fresh(Generic[R]):
    """Ids in the order of admission, each with its pledge in blocks."""

    def __init__(self, view: KvView[R]) -> None:
        self._view = view
        self.capacity = view.capacity - view.watermark
        self.pledged = 0
        self._pledges: dict[str, int] = {}

    def pledge(self, request: R) -> int:
        """An upper bound of the blocks the request holds when its next token comes."""
        return self._view.bound(request)

    def admits(self, request: R, besides: int = 0) -> bool:
        """Whether the request may join, `besides` blocks being pledged to others of the same step."""
        if self._view.name(request) in self._pledges:
            return True
        others = self.pledged + besides
        return not others or others + self.pledge(request) <= self.capacity

    def add(self, request: R) -> None:
        name = self._view.name(request)
        if name not in self._pledges:
            self._pledges[name] = self.pledge(request)
            self.pledged += self._pledges[name]

    def discard(self, name: str) -> None:
        self.pledged -= self._pledges.pop(name, 0)

    def __contains__(self, name: str) -> bool:
        return name in self._pledges

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._pledges))

    def __len__(self) -> int:
        return len(self._pledges)
