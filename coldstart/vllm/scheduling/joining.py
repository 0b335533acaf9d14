"""The two waiting queues that vLLM sees in a step in which the express lane has decided who joins.

Invariant: only who joins can be peeked at or popped; the length counts everybody, for vLLM's own sums.
"""

from __future__ import annotations

from collections import deque

from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import Request


class JoiningQueue(FCFSRequestQueue):
    """A copy of those of a queue that join; `others` wait there besides."""

    others = 0

    @classmethod
    def of(cls, joining: list[Request], everybody: int) -> JoiningQueue:
        made = cls(joining)
        made.others = everybody - len(joining)
        return made

    def __len__(self) -> int:
        return deque.__len__(self) + self.others

    def __bool__(self) -> bool:
        return deque.__len__(self) > 0
