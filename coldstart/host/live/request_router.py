"""Admission of requests to the core of a host or a fleet, without I/O.

The HTTP application uses a host's driver or a fleet's control only through this interface. All code runs on one event loop,
so the core processes one event at a time.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

import coldstart
from coldstart.host.events import RequestArrived, RequestEnded, Tick
from coldstart.host.launches import Catalogue, Destination
from coldstart.host.live.continuation import Continuation
from coldstart.host.live.log import Log
from coldstart.host.live.metrics import Metrics
from coldstart.host.live.upstream import Replica, UpstreamResponse
from coldstart.host.status import HostFacts, Progress


@dataclass(eq=False)
class AdmissionRefusedError(Exception):
    """The request is rejected with an HTTP status and a reason.

    If `retry_after_s` is set, a retry may succeed after that many seconds. The client receives `reason` and `hint`. The log
    also contains `log_detail`.
    """

    status: int
    reason: str
    retry_after_s: float | None = None
    log_detail: str = ""
    hint: str = ""

    def __str__(self) -> str:
        return self.reason


def build_unknown_model_error(asked: str | None) -> AdmissionRefusedError:
    """Build the error for a request whose model name is unknown or missing."""
    missing = asked is None
    reason = "the request does not specify a model" if missing else f"The model `{asked}` does not exist."
    return AdmissionRefusedError(404, reason)


@dataclass(eq=False)
class MovingStream:
    """A stream that is being migrated to `target`. `has_left` is True once the source has been stopped.

    `settled` completes when the migration ends, with True if the stream has reached the target.
    """

    target: Replica
    settled: asyncio.Future[bool]
    has_left: bool = False


@dataclass(eq=False)
class Ticket:
    """Admission ticket of a request, from its arrival to its end.

    `ticket_id` identifies the request in the core and the log, and `request_id` at its server. The future `granted` resolves
    to the server for the request, or raises AdmissionRefusedError. `is_hit` is True if the request did not wait. `target` is
    the server that processes the request, and `move` is its current migration.
    `continuation` is the state of a response that can continue on another server, and `response` is the current response.
    `earlier_tries` is the number of earlier admissions, of which `unsent_tries` failed before the request was sent.
    `evicted_models` were evicted for the request.
    """

    ticket_id: str
    destination: Destination
    arrived_at: float
    granted: asyncio.Future[Replica]
    target: Replica | None = None
    move: MovingStream | None = None
    is_hit: bool = False
    dispatched_at: float | None = None
    continuation: Continuation | None = None
    response: UpstreamResponse | None = None
    earlier_tries: int = 0
    unsent_tries: int = 0
    evicted_models: list[str] = field(default_factory=list)
    request_id: str = ""

    def reject(self, refused: AdmissionRefusedError) -> None:
        """Make `granted` raise this error, unless a server has already been granted."""
        if not self.granted.done():
            self.granted.set_exception(refused)
            # Retrieve the exception: if the client has disconnected, the event loop would log it.
            self.granted.exception()

    def grant(self, replica: Replica) -> None:
        """Grant this server to the request, even if another server was granted before."""
        self.granted = asyncio.get_running_loop().create_future()
        self.granted.set_result(replica)

    def requeue(self) -> None:
        """Continue the request at the target of the migration, or at its current server if the migration was rolled back."""
        if self.move is not None and not self.move.has_left and not self.move.settled.done():
            self.move.has_left = True
            self.grant(self.move.target)

    def record_first_chunk(self) -> None:
        """Mark the migration as successful when its target sends the first chunk."""
        move = self.move
        if move is not None and move.has_left and not move.settled.done():
            self.target = move.target
            move.settled.set_result(True)

    @property
    def queued_s(self) -> float | None:
        """Return the seconds from the request's arrival until it was forwarded, or None if it was not forwarded."""
        return None if self.dispatched_at is None else self.dispatched_at - self.arrived_at


class RequestRouter(ABC):
    """Interface between the HTTP application and the core. It admits requests, and selects the server for each request.

    Invariant: the core receives exactly one arrival event and one end event for each request. `stopping_reason` is the
    reason for rejections once the gateway is stopping. If `resumes_streams` is set, a stream whose server exited continues on
    another server. `_end_move` ends the migration of a request.
    """

    metrics: Metrics
    resumes_streams: bool
    stopping_reason: str
    _end_move: Callable[[Ticket], None]

    def __init__(self, catalogue: Catalogue, log: Log, clock: Callable[[], float]) -> None:
        self.catalogue, self.log, self.clock = catalogue, log, clock
        self.facts = HostFacts(pid=os.getpid(), version=coldstart.__version__, began=clock())
        self._tickets: dict[str, Ticket] = {}
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None

    def admit_request(self, asked: str | None, *, is_client_request: bool = True) -> Ticket:
        """Admit a request for the model name `asked`.

        `is_client_request` is False if an operator starts the model without a request.

        Raises:
            AdmissionRefusedError: The model is unknown or the gateway is stopping. If the request is rejected later,
                `granted` of the returned ticket raises this error.
        """
        if self.facts.stopping:
            raise AdmissionRefusedError(503, self.stopping_reason, 5.0)
        route = self.catalogue.find_destination(asked)
        if route is None:
            raise build_unknown_model_error(asked)
        return self._admit(route, is_client_request=is_client_request)

    def _admit(self, route: Destination, *, is_client_request: bool, **members: Any) -> Ticket:
        """Admit a request, and report its arrival to the core. `members` are further fields of its ticket."""
        self._number += 1
        future: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        ticket = Ticket(str(self._number), route, self.clock(), future, **members)
        self._tickets[ticket.ticket_id] = ticket
        self.emit(RequestArrived(ticket.ticket_id, route.model, is_client_request))
        ticket.is_hit = future.done() and future.exception() is None
        if is_client_request:
            facts = self.facts.get_model(route.model)
            facts.requests += 1
            facts.hits += ticket.is_hit
        return ticket

    def end_request(self, ticket: Ticket) -> None:
        """Report to the core that a request has ended, whether it succeeded or not."""
        if self._tickets.pop(ticket.ticket_id, None) is not None:
            self._end_move(ticket)
            self.emit(RequestEnded(ticket.ticket_id))

    @abstractmethod
    def emit(self, event: RequestArrived | RequestEnded | Tick) -> None:
        """Send an event to the core and execute the resulting actions."""

    @abstractmethod
    async def readmit_request(self, ticket: Ticket, replica: Replica, error: Exception) -> Ticket | None:
        """Admit a request again after its server failed. Return its new ticket, or None if no other server can handle it.

        Another server can handle the request if its response has not begun, or if its stream can continue on that server.
        """

    @abstractmethod
    def get_start_progress(self, model: str) -> Progress:
        """Return the start progress of the model, which is sent to waiting clients."""

    @abstractmethod
    def status(self) -> Mapping[str, Any]:
        """Build the document of GET /status."""

    def _tick(self) -> None:
        self.emit(Tick())

    def _refuse(self, number: str, refused: AdmissionRefusedError) -> None:
        ticket = self._tickets.get(number)
        if ticket is not None and not ticket.granted.done():
            del self._tickets[number]
            ticket.reject(refused)

    def _dispatch(self, number: str, replica: Replica | None) -> None:
        """Grant a server to a waiting request. A request whose server was lost keeps it until its connection breaks."""
        ticket = self._tickets.get(number)
        if ticket is not None and not ticket.granted.done() and replica is not None:
            ticket.dispatched_at, ticket.target = self.clock(), replica
            ticket.granted.set_result(replica)

    def reject_requests(self) -> None:
        """Reject all new and waiting requests, because the gateway stops."""
        self.facts.stopping = True
        for ticket in self._tickets.values():
            ticket.reject(AdmissionRefusedError(503, self.stopping_reason, 5.0))

    def _set_timer(self, due: float) -> None:
        """Schedule the next Tick event for time `due`, or cancel it if `due` is infinity."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due < inf:
            wait = max(0.0, due - self.clock()) + 0.001
            self._timer = asyncio.get_running_loop().call_later(wait, self._tick)
