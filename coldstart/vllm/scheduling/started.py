"""vLLM's running list in two parts, so that a step touches the requests it serves and no others.

Invariants: every request of vLLM's running list is either active (visible in the last step) or parked, never
both; a parked request keeps its blocks behind the gate `next_decode_eligible_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from vllm.v1.request import Request, RequestStatus

PARKED = 1 << 62
"""A step number that is never reached."""


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
        """Forget active requests that finished or were preempted since the last step."""
        running = RequestStatus.RUNNING
        self.active = [request for request in self.active if request.status == running]

    def discard(self, request: Request) -> None:
        """The request left vLLM's running list."""
        if request in self.parked:
            del self.parked[request]
        elif request in self.active:
            self.active.remove(request)

    def arrange(self, chosen: Iterable[Request], in_flight: Callable[[Request], bool]) -> int:
        """Show the chosen requests that have started, park the other active ones; how many were parked.

        Those in flight are active still, ahead of the chosen: vLLM passes over them, and evicts from the end.
        """
        running = RequestStatus.RUNNING
        shown = [request for request in chosen if request.status == running]
        kept = set(shown)
        others = [request for request in self.active if request not in kept]
        under_way = [request for request in others if in_flight(request)]
        dropped = [request for request in others if not in_flight(request)] if under_way else others
        for request in dropped:
            request.next_decode_eligible_step = PARKED
            self.parked[request] = None
        for request in shown:
            if self.parked.pop(request, self) is None:
                request.next_decode_eligible_step = 0
        self.active = under_way + shown
        return len(dropped)
