"""Admission of one request: it is granted a server, or rejected."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from coldstart.host.launches import Route
from coldstart.host.live.continuation import Continuation
from coldstart.host.live.upstream import Replica, UpstreamAnswer


class AdmissionRefusedError(Exception):
    """The request is rejected: HTTP status, reason, and the seconds after which a retry may succeed.

    `reason` is for the client; `detail` is added in the log.
    """

    def __init__(
        self, status: int, reason: str, retry_after_s: float | None = None, detail: str = ""
    ) -> None:
        super().__init__(reason)
        self.status, self.reason, self.retry_after_s, self.detail = status, reason, retry_after_s, detail


def unknown(asked: str | None) -> AdmissionRefusedError:
    """Return the rejection of a request that names an unknown model, or none."""
    missing = asked is None
    reason = "the request names no model" if missing else f"The model `{asked}` does not exist."
    return AdmissionRefusedError(404, reason)


@dataclass(eq=False)
class Ticket:
    """A request from its arrival to its end.

    `granted` returns the server of the request, or raises AdmissionRefusedError. `hit`: the request did not wait.

    `stream` is the state of an answer that can continue at another server, `answer` the current answer. The request was
    admitted `tries` times before. `keep_s`: seconds that its model stays idle after it; None: those of its configuration.
    `evicted` are the models whose memory it needed.
    """

    number: str
    route: Route
    arrived: float
    granted: asyncio.Future[Replica]
    hit: bool = False
    dispatched: float | None = None
    stream: Continuation | None = None
    answer: UpstreamAnswer | None = None
    tries: int = 0
    keep_s: float | None = None
    evicted: list[str] = field(default_factory=list)

    def refuse(self, refused: AdmissionRefusedError) -> None:
        """Let `granted` raise this error, unless the request already has a server."""
        if not self.granted.done():
            self.granted.set_exception(refused)
            # Its client may be disconnected: without this the event loop logs an exception that was never
            # retrieved.
            self.granted.exception()

    def interrupted(self) -> None:
        """Handle the interruption of the answer: the request continues at the server of `granted`."""

    def went_on(self) -> None:
        """Handle the first piece of an answer."""

    @property
    def queued_s(self) -> float | None:
        """Return the seconds from arrival until the request was forwarded."""
        return None if self.dispatched is None else self.dispatched - self.arrived
