"""Groups that requests are sent to, and the assignment of requests to them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from urllib.parse import urlsplit

from coldstart.fleet.live.orders import RankUp
from coldstart.host.live.tickets import Ticket
from coldstart.host.live.upstream import Replica, Upstream

# Within a data centre, a connection that takes longer has no server at its other end.
CONNECT_S = 2.5


class FleetReplica(Replica):
    """A group of the core that serves; `up` is the worker that answers for it."""

    def __init__(self, group: str, model: str, up: RankUp) -> None:
        url = urlsplit(up.url)
        place = str(url.hostname), url.port or 80
        super().__init__(model, Upstream(place, connect_s=CONNECT_S), up.key)
        self.group, self.mode, self.start_s = group, up.mode, up.start_s


@dataclass(eq=False)
class MovingStream:
    """A stream that moves to `target`, which has it from the moment the stream has `left` its group.

    `settled` is done when the move has ended, with its success.
    """

    target: FleetReplica
    settled: asyncio.Future[bool]
    left: bool = False


@dataclass(eq=False)
class FleetTicket(Ticket):
    """Ticket of a fleet.

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
        if self.move is not None and not self.move.left and not self.move.settled.done():
            self.move.left = True
            self.grant(self.move.target)

    def went_on(self) -> None:
        """Implement Ticket: record the success of a move at the first piece from its target."""
        move = self.move
        if move is not None and move.left and not move.settled.done():
            self.target = move.target
            move.settled.set_result(True)
