"""When a stream of a host can go on at the server that its model gets next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from coldstart.host.live.tickets import Ticket
from coldstart.host.live.upstream import Replica
from coldstart.host.model_state import Model, State

END_S = 10.0
"""Time in seconds that a server whose connections broke off has to end."""
LOOK_S = 0.02


def is_resumable(ticket: Ticket) -> bool:
    """Return whether the request's stream had begun, for the first time: a second time it may be what its servers die of."""
    return ticket.stream is not None and bool(ticket.stream.tokens) and not ticket.tries


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
    """Return whether the core takes a model without a server for ready, or would refuse it for having just failed."""
    known = models.get(name)
    if known is None or name in residences:
        return False
    return known.state is State.READY or now < known.retry_at
