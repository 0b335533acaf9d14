"""Several batches in flight under pipeline parallelism: who is in one, and whose bookkeeping drives it (FastServe, 4.3).

vLLM asks for a batch as long as a stage is free, before the earlier ones are back. Without asynchronous scheduling (model
runner V1, so always on the CPU platform) its synchronous scheduler has then no token to compute for a request whose last
one is still on its way; with it (model runner V2) a gate keeps a request out for as many steps as there are stages.

Invariant: a request in flight is neither scheduled again nor evicted by us, and holds its place in the order meanwhile.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus


class PipelinedScheduler(AsyncScheduler):
    """vLLM's asynchronous scheduler, with its synchronous bookkeeping where a pipeline runs without placeholders."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stages: int = self.parallel_config.pipeline_parallel_size
        if self.stages > 1 and not self.scheduler_config.async_scheduling:
            self._keep_synchronous_books()

    def in_flight(self, request: Request) -> bool:
        """Whether a batch under way has yet to bring the token that the request's next step computes.

        Never without a pipeline: there the steps under way are vLLM's asynchronous ones, which go on without it.
        """
        if self.stages == 1 or request.status != RequestStatus.RUNNING:
            return False
        gate: int = request.next_decode_eligible_step
        return not unscheduled(request) or self.current_step + 1 < gate

    def _keep_synchronous_books(self) -> None:
        # On the object: as overrides they would cost a call for every token where there is no pipeline.
        for book in (Scheduler._update_after_schedule, Scheduler._update_request_with_output):
            setattr(self, book.__name__, MethodType(book, self))


def unscheduled(request: Request) -> int:
    """Tokens that exist, or whose place is held, and that no step has been asked to compute."""
    tokens: int = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
    return tokens


def to_come(request: Request) -> int:
    """Tokens of the request once every step under way has brought its own."""
    tokens: int = max(request.num_tokens + request.num_output_placeholders, request.num_computed_tokens + 1)
    return tokens
