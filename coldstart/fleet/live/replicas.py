"""The groups that a gateway sends to, and its requests' places with them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from urllib.parse import urlsplit

from coldstart.fleet.handover import Handover, HandoverPhase, Means
from coldstart.fleet.live.messages import GroupRoute
from coldstart.host.live.tickets import Ticket
from coldstart.host.live.upstream import Replica, Upstream

# A connection within a data centre that takes longer has nobody at its other end.
CONNECT_S = 2.5


class FleetReplica(Replica):
    """A group that serves. It takes `capacity` requests at once, has `busy`, and is not asked before `suspect_until`."""

    def __init__(self, route: GroupRoute) -> None:
        url = urlsplit(route.url)
        super().__init__(route.model, Upstream((str(url.hostname), url.port or 80), connect_s=CONNECT_S))
        self.group, self.capacity = route.group, route.capacity
        self.mode, self.start_s = route.mode, route.start_s
        self.busy, self.suspect_until, self.withdrawn = 0, 0.0, False


@dataclass(eq=False)
class MovingStream:
    """A stream on its way to `target`; `settled`: whether it is there."""

    target: FleetReplica
    handover: Handover
    settled: asyncio.Future[bool]


@dataclass(eq=False)
class FleetTicket(Ticket):
    """`target` has it now; `move` is its way to another one. `unsent`: of its `tries`, those in which it was not sent."""

    target: FleetReplica | None = None
    move: MovingStream | None = None
    unsent: int = 0

    def grant(self, replica: FleetReplica) -> None:
        """Have it go on there, whatever was granted before."""
        self.granted = asyncio.get_running_loop().create_future()
        self.granted.set_result(replica)

    def interrupted(self) -> None:
        """As Ticket: the pipeline makes no more of it, it goes on at the target; or where it was, if that was given up."""
        if self.move is not None and self.move.handover.drained(Means.RECOMPUTE) is not None:
            self.grant(self.move.target)

    def went_on(self) -> None:
        """As Ticket: a stream that was moved is there, also one of which nothing had come before."""
        move = self.move
        if move is not None and move.handover.phase is HandoverPhase.MOVING and not move.settled.done():
            self.target = move.target
            move.settled.set_result(True)
