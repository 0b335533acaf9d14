"""Queues that limit which requests vLLM's schedule() considers in a step.

Invariants: every request that was added and not removed is in the waiting queue exactly once. vLLM's admission loop
(peek, pop, truth value) sees only the shown requests; length and iteration cover all requests, because vLLM counts them
all. A request with a slot is either active or parked. A parked request keeps its blocks and its slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from coldstart.vllm.scheduling.view import RUNNING


class PickedQueue(RequestQueue):
    """Waiting queue that shows only the requests selected by `show` to vLLM's admission loop."""

    def __init__(self) -> None:
        self._requests_by_id: dict[str, Request] = {}
        self._shown: list[Request] = []

    def show(self, requests: Iterable[Request]) -> None:
        """Select the requests that the admission loop sees. Requests that are not in the queue are ignored."""
        picked = [request for request in requests if request.request_id in self._requests_by_id]
        self._shown = picked[::-1]

    def add_request(self, request: Request) -> None:
        self._requests_by_id[request.request_id] = request

    def prepend_request(self, request: Request) -> None:
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add_request(request)

    def pop_request(self) -> Request:
        request = self._shown.pop()
        del self._requests_by_id[request.request_id]
        return request

    def peek_request(self) -> Request:
        return self._shown[-1]

    def remove_request(self, request: Request) -> None:
        del self._requests_by_id[request.request_id]
        self._shown = [other for other in self._shown if other is not request]

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request.request_id in self._requests_by_id:
                self.remove_request(request)

    def get(self, request_id: str) -> Request | None:
        return self._requests_by_id.get(request_id)

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and request.request_id in self._requests_by_id

    def __bool__(self) -> bool:
        return bool(self._shown)

    def __len__(self) -> int:
        return len(self._requests_by_id)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests_by_id.values()))


class SlotHolders:
    """Requests that have a slot: active requests, which run in the current step, and parked requests.

    Both are in the order in which they were activated or parked.
    """

    def __init__(self) -> None:
        self.active: list[Request] = []
        self.parked: dict[Request, None] = {}

    def __len__(self) -> int:
        return len(self.active) + len(self.parked)

    def __iter__(self) -> Iterator[Request]:
        return iter([*self.active, *self.parked])

    def refresh(self) -> None:
        """Drop the requests that have finished, were preempted, or are waiting for more input."""
        self.active = [request for request in self.active if request.status is RUNNING]
        self.parked = {request: None for request in self.parked if request.status is RUNNING}

    def discard(self, request: Request) -> None:
        """Remove an evicted request."""
        if self.parked.pop(request, self) is self and request in self.active:
            self.active.remove(request)

    def activate_only(self, requests: list[Request], is_in_flight: Callable[[Request], bool]) -> int:
        """Activate `requests`, and park all other active requests. Return the number of newly parked requests.

        Requests in flight stay active and precede the activated requests, because vLLM skips them and evicts from the
        end.
        """
        kept = set(requests)
        dropped = [request for request in self.active if request not in kept]
        staying = [request for request in dropped if is_in_flight(request)]
        for request in dropped:
            if request not in staying:
                self.parked[request] = None
        if self.parked:
            for request in requests:
                self.parked.pop(request, None)
        self.active = staying + requests
        return len(dropped) - len(staying)
