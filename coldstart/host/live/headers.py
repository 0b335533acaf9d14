"""HTTP headers of an exchange: those forwarded in each direction, and those that the gateway adds.

Invariant: hop-by-hop headers (RFC 9110, section 7.6.1) and the client's keys and cookies are not forwarded.
"""

from __future__ import annotations

import re
from math import inf
from uuid import uuid4

from coldstart.contract import environment
from coldstart.contract.arguments import Arguments
from coldstart.host.live import answers
from coldstart.host.live.answers import Headers, Scope
from coldstart.host.live.front import Ticket
from coldstart.host.live.upstream import Replica

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)", re.ASCII)
_DURATION = re.compile(rf"(?:{_PART.pattern})+", re.ASCII)
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?", re.ASCII)


def parse_keep_alive(text: str) -> float:
    """Return a time in seconds; infinity for a negative one. Raises ValueError for anything else."""
    given = text.strip()
    size = given.removeprefix("-")
    if _NUMBER.fullmatch(size):
        seconds = float(size)
    elif _DURATION.fullmatch(size):
        seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(size))
    else:
        raise ValueError(
            f"invalid keep-alive time {text[:40]!r}: write seconds, 0, -1, or a duration such as 5m"
        )
    return inf if size != given else seconds


_HOP = frozenset(
    b"connection http2-settings keep-alive proxy-authenticate proxy-authorization te trailer trailers transfer-encoding"
    b" upgrade".split()
)
# A client's keys and cookies are for the gateway alone.
_SECRET = frozenset((b"authorization", b"x-api-key", b"cookie", b"x-coldstart-admin-key"))
_KEEP_ALIVE = b"x-coldstart-keep-alive"
_NOT_SENT = _HOP | _SECRET | {_KEEP_ALIVE, b"host", b"content-length", b"x-request-id", b"expect"}
_NOT_PASSED = _HOP | {b"x-request-id", b"server", b"date", b"server-timing"}
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:=/+@-]{1,128}")
EVENTS = b"text/event-stream"
# nginx and compatible proxies buffer an answer without this header.
UNBUFFERED = (b"x-accel-buffering", b"no")


def choose_request_id(scope: Scope) -> bytes:
    """Return the client's request id, or a new one if it has none that can be forwarded."""
    given: bytes = dict(scope["headers"]).get(b"x-request-id", b"")
    return given if _REQUEST_ID.fullmatch(given) else uuid4().hex.encode()


def find_keep_alive(scope: Scope) -> float | None:
    """Return the seconds that the model should stay idle after the request; None if it does not say. Raises ValueError."""
    given = dict(scope["headers"]).get(_KEEP_ALIVE)
    return None if given is None else parse_keep_alive(given.decode("latin-1"))


def forward_request(scope: Scope, number: bytes, key: str) -> Headers:
    """Return the client's headers for the server, with the request id `number` and the server's own key, if any."""
    given = [(name, value) for name, value in scope["headers"] if name not in _NOT_SENT]
    return [*given, *present_key(key), (b"x-request-id", number)]


def present_key(key: str) -> Headers:
    """Return the Authorization header for a server's own key; empty without a key."""
    return [(b"authorization", b"Bearer " + key.encode())] if key else []


def find_server_key(args: Arguments) -> str:
    """Return the API key that a model's server requires by its arguments or its environment; empty for none."""
    keys = args.value("api_key")
    if isinstance(keys, (list, tuple)):
        keys = keys[0] if keys else None
    return str(keys) if keys else environment.VLLM_API_KEY.read()


def forward_answer(headers: Headers, *, streams: bool) -> Headers:
    """Return the server's headers for the client; with `streams`, disable buffering by proxies."""
    passed = [(name.lower(), value) for name, value in headers if name.lower() not in _NOT_PASSED]
    return [*passed, UNBUFFERED] if streams else passed


def build_for_stream() -> Headers:
    """Return the headers of a stream that begins before its server answers."""
    return [(b"content-type", EVENTS + b"; charset=utf-8"), (b"cache-control", b"no-cache"), UNBUFFERED]


def build_for_answer(number: bytes, mode: str, server_timing: str) -> Headers:
    """Return the headers with the request id, the start mode of its server and the Server-Timing value."""
    own = [(b"x-coldstart-mode", mode.encode()), (b"server-timing", server_timing.encode())]
    return [(b"x-request-id", number), *own]


def format_timing(replica: Replica, ticket: Ticket, first_s: float | None) -> str:
    """Return the Server-Timing value of a request whose first chunk came after `first_s` seconds."""
    start = None if ticket.hit else replica.start_s
    return answers.timing(
        [("queued", ticket.queued_s, None), ("start", start, replica.mode), ("first-token", first_s, None)]
    )
