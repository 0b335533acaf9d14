"""Several batches in flight under pipeline parallelism: which requests are in one (FastServe, 4.3).

vLLM schedules a batch while a stage is free, before earlier batches have returned. Without asynchronous scheduling (model
runner V1, always on the CPU platform), vLLM has no token to compute for a request whose last token is still in flight. With
it (model runner V2), a gate keeps a request out for as many steps as there are stages.

Invariant: we neither schedule nor evict a request in flight, and it keeps its place in the order.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus


class PipelinedScheduler(AsyncScheduler):
    """vLLM's asynchronous scheduler, with its synchronous bookkeeping in a pipeline that runs without placeholders."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stages: int = self.parallel_config.pipeline_parallel_size
        if self.stages > 1 and not self.scheduler_config.async_scheduling:
            self._keep_synchronous_books()

    def is_in_flight(self, request: Request) -> bool:
        """Return whether a batch in flight has not yet returned the token that the request's next step needs.

        Without a pipeline the result is False: vLLM's asynchronous steps do not wait for that token.
        """
        if self.stages == 1 or request.status != RequestStatus.RUNNING:
            return False
        gate: int = request.next_decode_eligible_step
        return not unscheduled(request) or self.current_step + 1 < gate

    def _keep_synchronous_books(self) -> None:
        # Set on the object: as overrides they would cost a call per token without a pipeline.
        for book in (Scheduler._update_after_schedule, Scheduler._update_request_with_output):
            setattr(self, book.__name__, MethodType(book, self))


def unscheduled(request: Request) -> int:
    """Return the number of tokens, including placeholders, that no step has been scheduled to compute."""
    tokens: int = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
    return tokens


def count_tokens_after_flight(request: Request) -> int:
    """Return the number of the request's tokens after every step in flight has returned."""
    tokens: int = max(request.num_tokens + request.num_output_placeholders, request.num_computed_tokens + 1)
    return tokens
