"""A request's place with the front: granted a server, or refused."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from coldstart.host.launches import Route
from coldstart.host.live.continuation import Continuation
from coldstart.host.live.upstream import Replica, UpstreamAnswer


class AdmissionRefusedError(Exception):
    """A request that is not taken: HTTP status, why, and after how many seconds trying again may help.

    `reason` is for the client; `detail` is what the log says beside it.
    """

    def __init__(
        self, status: int, reason: str, retry_after_s: float | None = None, detail: str = ""
    ) -> None:
        super().__init__(reason)
        self.status, self.reason, self.retry_after_s, self.detail = status, reason, retry_after_s, detail


def unknown(asked: str | None) -> AdmissionRefusedError:
    """For a name that means no model, or none."""
    missing = asked is None
    reason = "the request names no model" if missing else f"The model `{asked}` does not exist."
    return AdmissionRefusedError(404, reason)


@dataclass(eq=False)
class Ticket:
    """A request from its arrival to its end.

    `granted` returns where to send it, or raises AdmissionRefusedError. `hit`: the request did not wait.

    Requests that waited together are sent in their order: each once the one `before` it is `sent`. `stream` is what is known of
    an answer that can go on elsewhere, `answer` where it comes from now; it was taken in `tries` times before.
    """

    number: str
    route: Route
    arrived: float
    granted: asyncio.Future[Replica]
    hit: bool = False
    dispatched: float | None = None
    before: asyncio.Future[None] | None = None
    sent: asyncio.Future[None] | None = None
    stream: Continuation | None = None
    answer: UpstreamAnswer | None = None
    tries: int = 0

    def refuse(self, refused: AdmissionRefusedError) -> None:
        """Have `granted` raise this, unless the request was granted a server already."""
        if not self.granted.done():
            self.granted.set_exception(refused)
            # Its client may be gone: without this the event loop logs an exception that was never retrieved.
            self.granted.exception()

    def line_up(self, replica: Replica) -> None:
        """Take a place behind all that are to be sent there."""
        self.before, self.sent = replica.tail, asyncio.get_running_loop().create_future()
        replica.tail = self.sent

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

    def interrupted(self) -> None:
        """What it was read from is closed: it goes on by `granted`."""

    def went_on(self) -> None:
        """A server's first piece has come."""

    @property
    def queued_s(self) -> float | None:
        """Seconds from its arrival until it was sent on."""
        return None if self.dispatched is None else self.dispatched - self.arrived
