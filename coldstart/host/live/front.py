"""Admission of requests before a pure core: what the driver of a host and the control of a fleet share.

The HTTP application knows no other interface. All code runs on one event loop, so the core processes one event at a time.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Generic, TypeVar

import coldstart
from coldstart.host.launches import Catalogue, Destination
from coldstart.host.live.continuation import Continuation
from coldstart.host.live.log import Log
from coldstart.host.live.metrics import Metrics
from coldstart.host.live.upstream import Replica, UpstreamAnswer
from coldstart.host.status import HostFacts, Progress


class AdmissionRefusedError(Exception):
    """The request is rejected: HTTP status, reason, and the seconds after which a retry may succeed.

    `reason` and `hint` are for the client; `detail` is added in the log.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        retry_after_s: float | None = None,
        detail: str = "",
        hint: str = "",
    ) -> None:
        super().__init__(reason)
        self.status, self.reason, self.retry_after_s = status, reason, retry_after_s
        self.detail, self.hint = detail, hint


def unknown(asked: str | None) -> AdmissionRefusedError:
    """Return the error for a request with an unknown model name or without a model name."""
    missing = asked is None
    reason = "the request names no model" if missing else f"The model `{asked}` does not exist."
    return AdmissionRefusedError(404, reason)


@dataclass(eq=False)
class Ticket:
    """A request, from its arrival until it has ended.

    `granted` returns the server of the request, or raises AdmissionRefusedError. `hit`: the request did not wait.

    `stream` is the state of a response that can continue at another server, `answer` the current response. The request was
    admitted `tries` times before. `evicted` are the models whose memory it needed. Its servers know it as `request_id`.
    """

    number: str
    route: Destination
    arrived: float
    granted: asyncio.Future[Replica]
    hit: bool = False
    dispatched: float | None = None
    stream: Continuation | None = None
    answer: UpstreamAnswer | None = None
    tries: int = 0
    evicted: list[str] = field(default_factory=list)
    request_id: str = ""

    def refuse(self, refused: AdmissionRefusedError) -> None:
        """Make `granted` raise this error, unless the request already has a server."""
        if not self.granted.done():
            self.granted.set_exception(refused)
            # Its client may be disconnected: without this the event loop logs an exception that was never
            # retrieved.
            self.granted.exception()

    def interrupted(self) -> None:
        """Requeue the request after its response was interrupted; it continues at the server that `granted` returns."""

    def went_on(self) -> None:
        """Record the first chunk of a response."""

    @property
    def queued_s(self) -> float | None:
        """Return the seconds from arrival until the request was forwarded."""
        return None if self.dispatched is None else self.dispatched - self.arrived


T = TypeVar("T", bound=Ticket)


class Front(ABC, Generic[T]):
    """Admits requests, and decides which server answers each.

    `stopping` is the reason of refusals once it stops. With `resumes` a stream whose server ended continues elsewhere.
    """

    metrics: Metrics
    resumes: bool
    stopping: str

    def __init__(self, catalogue: Catalogue, log: Log, clock: Callable[[], float]) -> None:
        self.catalogue, self.log, self.clock = catalogue, log, clock
        self.facts = HostFacts(pid=os.getpid(), version=coldstart.__version__, began=clock())
        self._tickets: dict[str, T] = {}
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, asked: str | None, *, counted: bool = True) -> T:
        """Admit a request for the model name `asked`; `counted` is false for an operator's order.

        Raises:
            AdmissionRefusedError: The model is unknown or the gateway is stopping; the ticket's `granted` raises every
                later rejection.
        """
        if self.facts.stopping:
            raise AdmissionRefusedError(503, self.stopping, 5.0)
        route = self.catalogue.route(asked)
        if route is None:
            raise unknown(asked)
        return self._admit(route, counted=counted)

    @abstractmethod
    def _admit(self, route: Destination, *, counted: bool) -> T:
        """Admit a request and send its arrival to the core."""

    @abstractmethod
    def leave(self, ticket: Ticket) -> None:
        """Report the end of a request to the core, whether it was served or not."""

    @abstractmethod
    async def readmit(self, ticket: Ticket, replica: Replica, error: Exception) -> Ticket | None:
        """Admit a request again after its server failed, if no response had begun or its stream can continue elsewhere.

        Returns None if no other server can serve it.
        """

    @abstractmethod
    def progress(self, model: str) -> Progress:
        """Return the start progress of the model, for a waiting client."""

    @abstractmethod
    def status(self) -> Mapping[str, Any]:
        """Return the document of GET /status."""

    @abstractmethod
    def _tick(self) -> None:
        pass

    def _create_ticket(self, kind: type[T], route: Destination, **members: Any) -> T:
        self._number += 1
        future: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        ticket = kind(str(self._number), route, self.clock(), future, **members)
        self._tickets[ticket.number] = ticket
        return ticket

    def _note_arrival(self, ticket: T, counted: bool) -> None:
        """Record whether a request was granted at its arrival, and count it."""
        ticket.hit = ticket.granted.done() and ticket.granted.exception() is None
        if not counted:
            return
        facts = self.facts.get_model(ticket.route.model)
        facts.requests += 1
        facts.hits += ticket.hit

    def _refuse(self, number: str, refused: AdmissionRefusedError) -> None:
        """Reject a waiting request."""
        ticket = self._tickets.get(number)
        if ticket is not None and not ticket.granted.done():
            del self._tickets[number]
            ticket.refuse(refused)

    def _grant(self, ticket: T, replica: Replica) -> None:
        """Grant a server to a request."""
        ticket.dispatched = self.clock()
        ticket.granted.set_result(replica)

    def _set_timer(self, due: float) -> None:
        """Schedule a Tick at the time `due`; infinity schedules none."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due < inf:
            wait = max(0.0, due - self.clock()) + 0.001
            self._timer = asyncio.get_running_loop().call_later(wait, self._tick)
