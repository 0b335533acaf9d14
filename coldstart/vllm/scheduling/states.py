"""State of a request's KV, read from vLLM's request, and whether the request can run.

Invariant: a request is ready exactly when vLLM's next schedule() can give it tokens, memory aside.
"""

from __future__ import annotations

from enum import Enum

from vllm.v1.request import Request, RequestStatus

WAITING = RequestStatus.WAITING


class State(Enum):
    """State of a request's KV.

    NEW: never computed. RUNNING: in vLLM's running list (picked or parked). HOST: preempted, its KV is on the host or lost.
    LOADING and LOADED: an asynchronous load is in flight, or has finished. BLOCKED: waits for something else (a grammar, more
    input, tokens in flight).
    """

    NEW = "new"
    RUNNING = "running"
    HOST = "host"
    LOADING = "loading"
    LOADED = "loaded"
    BLOCKED = "blocked"


def read_state(request: Request, landed: set[str]) -> State:
    """Return the state of a request. `landed` are ids of requests whose asynchronous load has finished."""
    status = request.status
    if status is WAITING and not (request.num_computed_tokens or request.num_stale_output_tokens):
        return State.NEW  # shortcut for most waiting requests; the code below gives the same
    if status == RequestStatus.RUNNING:
        return State.BLOCKED if all_in_flight(request) else State.RUNNING
    if status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        return State.LOADED if request.request_id in landed else State.LOADING
    if status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        return State.NEW if _grammar_ready(request) else State.BLOCKED
    if status == RequestStatus.WAITING_FOR_STREAMING_REQ or _draining(request):
        return State.BLOCKED
    if request.num_computed_tokens > 0:
        return State.LOADED
    return State.HOST if status == RequestStatus.PREEMPTED else State.NEW


def all_in_flight(request: Request) -> bool:
    """Return whether the steps in flight already reach max_tokens, so that vLLM will not schedule another."""
    pending: int = request.num_output_placeholders
    certain: int = request.num_computed_tokens + 2 - pending
    return pending > 0 and certain >= request.num_prompt_tokens + request.max_tokens


def steps_left(request: Request) -> int:
    """Return the number of one-token steps, including the next, before which all_in_flight is certainly False."""
    steps: int = request.num_prompt_tokens + request.max_tokens - 1 - request.num_computed_tokens
    return steps


def _draining(request: Request) -> bool:
    """Return whether output sampled before a preemption is still undelivered; resuming now could sample it again."""
    return bool(request.num_stale_output_tokens) and not request.drop_stale_output


def _grammar_ready(request: Request) -> bool:
    structured = request.structured_output_request
    return structured is not None and structured.grammar is not None
