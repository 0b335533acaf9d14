"""When a stream of a host can go on at the server that its model gets next."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from coldstart.gateway.tickets import Ticket
from coldstart.gateway.upstream import Replica
from coldstart.host.model_state import State

if TYPE_CHECKING:
    from coldstart.gateway.driver import Driver

GONE_S = 10.0
"""So long the end of a server is waited for whose connections have broken off."""
LOOK_S = 0.02


async def possible(driver: Driver, ticket: Ticket, replica: Replica) -> bool:
    """Whether it can, once it can: never for what had not begun, nor a second time, for it may be what its servers die of."""
    name = ticket.route.model
    if ticket.stream is None or not ticket.stream.tokens or ticket.tries or driver.facts.stopping:
        return False
    deadline = driver.clock() + GONE_S
    while driver.residences.get(name) is replica or _not_yet(driver, name):
        if driver.clock() > deadline:
            return False
        await asyncio.sleep(LOOK_S)
    driver.log.say("again", model=name, made=len(ticket.stream.tokens))
    return name in driver.core.models


def _not_yet(driver: Driver, name: str) -> bool:
    """Whether the core takes a model for ready that has no server, or would refuse it for having just failed."""
    known = driver.core.models.get(name)
    if known is None or name in driver.residences:
        return False
    return known.state is State.READY or driver.clock() < known.retry_at
