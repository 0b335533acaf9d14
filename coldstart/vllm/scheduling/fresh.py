"""Protected requests: those without a new token since their admission or since the start of their load.

Invariant: the pledge of a request is the number of blocks that it may hold until its next token. The pledges
sum to at most the pool, unless there is only one. All protected requests can therefore get their next token
at once, and never evicting them cannot cause a deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm.v1.request import Request

from coldstart.vllm.scheduling.view import EngineView


class Fresh:
    """Ids of the protected requests in order of admission, with their pledges in blocks."""

    def __init__(self, view: EngineView) -> None:
        self._view = view
        self.capacity = view.capacity - view.watermark
        self.pledged = 0
        self._pledges: dict[str, int] = {}

    def pledge(self, request: Request) -> int:
        """Return an upper bound of the blocks that the request holds when its next token is computed."""
        return self._view.bound(request)

    def admits(self, request: Request, besides: int = 0) -> bool:
        """Return whether the request may join, with `besides` blocks pledged to other requests of the same step."""
        if self._view.name(request) in self._pledges:
            return True
        others = self.pledged + besides
        return not others or others + self.pledge(request) <= self.capacity

    def add(self, request: Request) -> None:
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
