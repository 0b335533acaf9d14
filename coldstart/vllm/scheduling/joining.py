"""The two waiting queues that vLLM sees in a step in which the express lane has decided who joins.

Invariant: only who joins can be peeked at or popped; the length counts everybody, for vLLM's own sums.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import Request


class JoiningQueue(FCFSRequestQueue):  # type: ignore[misc]
    """A copy of those of a queue that join, and how many others wait there."""

    def __init__(self, joining: Iterable[Request], everybody: int) -> None:
        super().__init__(joining)
        self._others = everybody - super().__len__()

    def __len__(self) -> int:
        joining: int = super().__len__()
        return joining + self._others

    def __bool__(self) -> bool:
        return bool(super().__len__())
