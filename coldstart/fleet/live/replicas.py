"""Groups that a gateway sends to, and the assignment of its requests to them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from urllib.parse import urlsplit

from coldstart.fleet.handover import Handover, HandoverPhase, Means
from coldstart.fleet.live.messages import GroupRoute
from coldstart.host.live.tickets import Ticket
from coldstart.host.live.upstream import Replica, Upstream

# Within a data centre, a connection that takes longer has no server at its other end.
CONNECT_S = 2.5


class FleetReplica(Replica):
    """A group that serves: at most `capacity` requests at once, `busy` now. It gets no request before `suspect_until`."""

    def __init__(self, route: GroupRoute) -> None:
        url = urlsplit(route.url)
        place = str(url.hostname), url.port or 80
        super().__init__(route.model, Upstream(place, connect_s=CONNECT_S), route.key)
        self.group, self.capacity = route.group, route.capacity
        self.mode, self.start_s = route.mode, route.start_s
        self.busy, self.suspect_until, self.withdrawn = 0, 0.0, False


@dataclass(eq=False)
class MovingStream:
    """A stream that moves to `target`; `settled` is done when the move has ended, with its success."""

    target: FleetReplica
    handover: Handover
    settled: asyncio.Future[bool]


@dataclass(eq=False)
class FleetTicket(Ticket):
    """Ticket of a fleet's gateway.

    `target` has the request now; `move` is its move to another group. `unsent` counts those of its `tries` in which
    it was not sent.
    """

    target: FleetReplica | None = None
    move: MovingStream | None = None
    unsent: int = 0

    def grant(self, replica: FleetReplica) -> None:
        """Let the request continue at this group, whatever was granted before."""
        self.granted = asyncio.get_running_loop().create_future()
        self.granted.set_result(replica)

    def interrupted(self) -> None:
        """Implement Ticket: continue at the target of the move, or at the current group if the move was rolled back."""
        if self.move is not None and self.move.handover.drained(Means.RECOMPUTE) is not None:
            self.grant(self.move.target)

    def went_on(self) -> None:
        """Implement Ticket: record the success of a move at the first piece from its target."""
        move = self.move
        if move is not None and move.handover.phase is HandoverPhase.MOVING and not move.settled.done():
            self.target = move.target
            move.settled.set_result(True)
