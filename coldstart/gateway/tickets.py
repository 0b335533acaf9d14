"""A request while it is in a gateway: where it goes, when its turn is, and what refuses it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from coldstart.gateway.upstream import Upstream
from coldstart.host.launches import Route


class AdmissionRefused(Exception):
    """A request that is not taken: HTTP status, why, and after how many seconds trying again may help."""

    def __init__(self, status: int, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.retry_after_s = status, reason, retry_after_s


@dataclass(eq=False)
class Ticket:
    """A request from its arrival to its end. `granted` gives where to send it, or raises AdmissionRefused; `hit`: none waited.

    Requests that waited together are sent in their order: each once the one `before` it is `sent`.
    """

    number: str
    route: Route
    arrived: float
    granted: asyncio.Future[Upstream]
    hit: bool = False
    dispatched: float | None = None
    before: asyncio.Future[None] | None = None
    sent: asyncio.Future[None] | None = None

    def line_up(self, upstream: Upstream) -> None:
        """Take a place behind all that are to be sent there."""
        self.before, self.sent = upstream.tail, asyncio.get_running_loop().create_future()
        upstream.tail = self.sent

    async def turn(self) -> None:
        """Wait for it."""
        if self.before is not None:
            await asyncio.wait([self.before])

    def passed_on(self) -> None:
        """It was sent, or never will be: the next may go, in the latter case when this one might have."""
        sent, before = self.sent, self.before
        if sent is None or sent.done():
            return
        if before is None or before.done():
            sent.set_result(None)
        else:
            before.add_done_callback(lambda _: self.passed_on())

    @property
    def queued_s(self) -> float | None:
        """Seconds from its arrival until it was sent on."""
        return None if self.dispatched is None else self.dispatched - self.arrived
