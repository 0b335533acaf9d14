"""Requests that have a slot, in two parts, so that a step touches only the requests that it serves.

Invariants: a request is either active (visible in the last step) or parked, never both. A parked request keeps its blocks
and its slot, and vLLM's schedule() does not see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vllm.v1.request import Request, RequestStatus

RUNNING = RequestStatus.RUNNING


class Started:
    """Requests by reference; both parts in the order in which they were shown or parked."""

    def __init__(self) -> None:
        self.active: list[Request] = []
        self.parked: dict[Request, None] = {}

    def __len__(self) -> int:
        return len(self.active) + len(self.parked)

    def __iter__(self) -> Iterator[Request]:
        yield from list(self.active)
        yield from list(self.parked)

    def refresh(self) -> None:
        """Remove requests that finished, were preempted, or wait for more input, since the last decision."""
        self.active = [request for request in self.active if request.status is RUNNING]

    def discard(self, request: Request) -> None:
        """Remove an evicted request."""
        if self.parked.pop(request, self) is self and request in self.active:
            self.active.remove(request)

    def arrange(self, shown: list[Request], in_flight: Callable[[Request], bool]) -> int:
        """Show these requests, park the other active ones, and return the number of parked requests.

        Requests in flight stay active, ahead of the shown ones: vLLM skips them, and evicts from the end.
        """
        kept, under_way = set(shown), list[Request]()
        dropped = [request for request in self.active if request not in kept]
        if dropped:
            under_way = [request for request in dropped if in_flight(request)]
            for request in dropped:
                if request not in under_way:
                    self.parked[request] = None
        if self.parked:
            for request in shown:
                self.parked.pop(request, None)
        self.active = under_way + shown
        return len(dropped) - len(under_way)
