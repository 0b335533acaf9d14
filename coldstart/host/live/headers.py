"""HTTP headers of an exchange: what is passed on in each direction, and what the gateway adds.

Invariant: hop-by-hop headers (RFC 9110, section 7.6.1) are passed on in neither direction.
"""

from __future__ import annotations

from uuid import uuid4

from coldstart.host.live import answers
from coldstart.host.live.answers import Headers, Scope
from coldstart.host.live.tickets import Ticket
from coldstart.host.live.upstream import Replica

_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer trailers transfer-encoding upgrade".split()
)
_NOT_SENT = _HOP | {b"host", b"content-length", b"x-request-id", b"expect"}
_NOT_PASSED = _HOP | {b"x-request-id", b"server", b"date", b"server-timing"}
EVENTS = b"text/event-stream"
# nginx and those that follow it keep an answer back otherwise.
UNBUFFERED = (b"x-accel-buffering", b"no")


def choose_request_id(scope: Scope) -> bytes:
    """Return the client's own id of the request, or a new one where it has none that can be passed on."""
    given: bytes = dict(scope["headers"]).get(b"x-request-id", b"")
    return given if given and len(given) <= 128 and given.isascii() else uuid4().hex.encode()


def forward_request(scope: Scope, number: bytes) -> Headers:
    """Return the client's headers for the server, with the id `number` of the request."""
    given = [(name, value) for name, value in scope["headers"] if name not in _NOT_SENT]
    return [*given, (b"x-request-id", number)]


def forward_answer(headers: Headers, *, streams: bool) -> Headers:
    """Return the server's headers for the client; `streams`: its answer is not to be buffered."""
    passed = [(name.lower(), value) for name, value in headers if name.lower() not in _NOT_PASSED]
    return [*passed, UNBUFFERED] if streams else passed


def build_for_stream() -> Headers:
    """Return the headers of a stream that begins before its server answers."""
    return [(b"content-type", EVENTS + b"; charset=utf-8"), (b"cache-control", b"no-cache"), UNBUFFERED]


def build_for_answer(number: bytes, mode: str, server_timing: str) -> Headers:
    """Return the request's id, the start mode of its server, and the time that each part took."""
    own = [(b"x-coldstart-mode", mode.encode()), (b"server-timing", server_timing.encode())]
    return [(b"x-request-id", number), *own]


def format_timing(replica: Replica, ticket: Ticket, first_s: float | None) -> str:
    """Return the Server-Timing of a request whose first piece came after `first_s`."""
    start = None if ticket.hit else replica.start_s
    return answers.timing(
        [("queued", ticket.queued_s, None), ("start", start, replica.mode), ("first-token", first_s, None)]
    )
