"""Waiting queue that shows vLLM's admission loop only the picked requests.

Invariants: every request that was added and not removed is in the queue exactly once. The loop (peek, pop, truth)
sees `shown` in its order; length and iteration cover all requests, for vLLM's own counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request


class PickedQueue(RequestQueue):
    """Requests by id. Iteration yields only those that `show` selected."""

    def __init__(self) -> None:
        self._held: dict[str, Request] = {}
        self._shown: list[Request] = []

    def show(self, requests: Iterable[Request]) -> None:
        """Replace the requests that the admission loop sees; ignore requests that are not in the queue."""
        picked = [request for request in requests if request.request_id in self._held]
        self._shown = picked[::-1]

    def add_request(self, request: Request) -> None:
        self._held[request.request_id] = request

    def prepend_request(self, request: Request) -> None:
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add_request(request)

    def pop_request(self) -> Request:
        request = self._shown.pop()
        del self._held[request.request_id]
        return request

    def peek_request(self) -> Request:
        return self._shown[-1]

    def remove_request(self, request: Request) -> None:
        del self._held[request.request_id]
        self._shown = [other for other in self._shown if other is not request]

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request.request_id in self._held:
                self.remove_request(request)

    def get(self, request_id: str) -> Request | None:
        return self._held.get(request_id)

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and request.request_id in self._held

    def __bool__(self) -> bool:
        return bool(self._shown)

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._held.values()))
