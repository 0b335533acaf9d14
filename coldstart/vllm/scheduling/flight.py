"""Several batches in flight under pipeline parallelism: which requests are in one (FastServe, 4.3).

vLLM schedules a batch while a stage is free, before earlier batches have returned. Without asynchronous scheduling (model
runner V1, always on the CPU platform), vLLM has no token to compute for a request whose last token is still in flight. With
it (model runner V2), a gate keeps a request out for as many steps as there are stages.

Invariant: we neither schedule nor evict a request in flight, and it keeps its place in the order.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus


class PipelinedScheduler(AsyncScheduler):
    """vLLM's asynchronous scheduler, which knows the requests of the batches in flight."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stages: int = self.parallel_config.pipeline_parallel_size

    def is_in_flight(self, request: Request) -> bool:
        """Return whether a batch in flight has not yet returned the token that the request's next step needs.

        Without a pipeline the result is False: vLLM's asynchronous steps do not wait for that token.
        """
        if self.stages == 1 or request.status != RequestStatus.RUNNING:
            return False
        gate: int = request.next_decode_eligible_step
        return not unscheduled(request) or self.current_step + 1 < gate


class SynchronousBooks:
    """vLLM's synchronous bookkeeping, for a pipeline that runs without placeholders.

    A class of its own: as overrides that ask for a pipeline, these methods would cost a call per token without one.
    """

    _update_after_schedule = Scheduler._update_after_schedule
    _update_request_with_output = Scheduler._update_request_with_output


def runs_without_placeholders(config: Any) -> bool:
    """Return whether vLLM runs a pipeline without asynchronous scheduling."""
    pipeline: int = config.parallel_config.pipeline_parallel_size
    return pipeline > 1 and not config.scheduler_config.async_scheduling


def unscheduled(request: Request) -> int:
    """Return the number of tokens, including placeholders, that no step has been scheduled to compute."""
    tokens: int = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
    return tokens


def count_tokens_after_flight(request: Request) -> int:
    """Return the number of the request's tokens after every step in flight has returned."""
    tokens: int = max(request.num_tokens + request.num_output_placeholders, request.num_computed_tokens + 1)
    return tokens
