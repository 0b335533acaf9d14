"""Conditions under which the next server of its model continues a stream, or answers an aborted request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress

from coldstart.host.live.tickets import Ticket
from coldstart.host.live.upstream import AbortedError, Replica
from coldstart.host.model_state import Model, State

END_S = 10.0
"""Time in seconds that a server has to end after its connections were lost."""
LOOK_S = 0.02


def is_resumable(ticket: Ticket, error: Exception) -> bool:
    """Return whether the request's stream has begun, or its server aborted it, and it was not resumed before.

    A request that is resumed twice may be the cause of the failures.
    """
    has_begun = ticket.stream is not None and bool(ticket.stream.tokens)
    return (has_begun or isinstance(error, AbortedError)) and not ticket.tries


def is_aborted(answer: bytes) -> bool:
    """Return whether a complete answer says that vLLM aborted the request, as it does when it ends."""
    if b'"abort"' not in answer:
        return False
    with suppress(ValueError, AttributeError, TypeError):
        return any(choice.get("finish_reason") == "abort" for choice in json.loads(answer).get("choices"))
    return False


async def await_end(
    replica: Replica,
    models: Mapping[str, Model],
    residences: Mapping[str, Replica],
    clock: Callable[[], float],
) -> bool:
    """Wait until `replica` has ended and its model can start again; return whether it can within END_S."""
    name, deadline = replica.name, clock() + END_S
    while residences.get(name) is replica or _must_wait(name, models, residences, clock()):
        if clock() > deadline:
            return False
        await asyncio.sleep(LOOK_S)
    return name in models


def _must_wait(name: str, models: Mapping[str, Model], residences: Mapping[str, Replica], now: float) -> bool:
    """Return whether the model must wait: the core has not yet seen its server end, or it is in backoff after a failure."""
    known = models.get(name)
    if known is None or name in residences:
        return False
    return known.state is State.READY or now < known.retry_at
