"""HTTP messages of an exchange: request bodies, the gateway's own responses, and headers in each direction.

The gateway parses only the model name and the `stream` flag in a body. The model's server parses the rest.

Invariant: hop-by-hop headers (RFC 9110, section 7.6.1) and the client's keys and cookies are not forwarded.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from math import ceil
from typing import Any, TypeVar
from uuid import uuid4

import msgspec
from starlette.responses import Response

from coldstart.contract import environment
from coldstart.contract.arguments import Arguments
from coldstart.host.endpoint import GatewayLimits
from coldstart.host.live.request_router import AdmissionRefusedError, Ticket
from coldstart.host.live.upstream import Replica

T = TypeVar("T")


class BodyMemory:
    """Memory budget in bytes for the request bodies that one gateway buffers."""

    def __init__(self, limits: GatewayLimits) -> None:
        self.total = max(limits.buffered_bytes, limits.body_bytes)
        self.used = 0

    async def read(self, receive: Receive) -> bytes:
        """Return the complete body of a request. The body counts toward the budget until `release` is called.

        Raises:
            ClientGoneError: The client disconnected.
            AdmissionRefusedError: The body exceeds the remaining budget.
        """
        parts: list[bytes] = []
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                part = message.get("body", b"")
                if self.used + len(part) > self.total:
                    raise AdmissionRefusedError(
                        503, "no memory for the request body: other requests use all memory for bodies", 1.0
                    )
                self.used += len(part)
                parts.append(part)
                if not message.get("more_body", False):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
        except BaseException:
            self.release(sum(map(len, parts)))
            raise

    def release(self, size: int) -> None:
        """Return `size` bytes to the budget."""
        self.used -= size


class _Routing(msgspec.Struct):
    """Fields of a request that the gateway reads. msgspec skips all others without creating objects."""

    model: str | None = None
    stream: msgspec.Raw = msgspec.Raw(b"")


_ROUTING = msgspec.json.Decoder(_Routing)
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def parse_routing(body: bytes) -> tuple[str | None, bool]:
    """Return the model name in a request body, and whether the response is to be streamed.

    Raises AdmissionRefusedError if the body is invalid.
    """
    found = parse_body(_ROUTING.decode, body)
    return found.model, bytes(found.stream) == b"true"


def replace_model(body: bytes, model: str) -> bytes:
    """Return the body with `model` as its model name. Raises AdmissionRefusedError if the body is invalid."""
    return msgspec.json.encode({**parse_body(_MEMBERS.decode, body), "model": model})


def parse_body(parse: Callable[[bytes], T], body: bytes) -> T:
    """Return the result of `parse` on the request body. Raises AdmissionRefusedError if the body is invalid."""
    try:
        encoding = json.detect_encoding(body)  # Windows programs write UTF-16 and byte order marks
        return parse(body if encoding == "utf-8" else body.decode(encoding).encode())
    except (ValueError, RecursionError) as error:
        raise AdmissionRefusedError(400, f"invalid request body: {error}") from error


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_TYPES = {
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "invalid_request_error",
    429: "RateLimitError",
    500: "InternalServerError",
}


def build_error(status: int, reason: str, hint: str = "") -> bytes:
    """Build the JSON body of an error response in OpenAI's format, with an additional field for the hint."""
    kind = _TYPES.get(status, "BadRequestError" if status < 500 else "ServiceUnavailableError")
    content: dict[str, object] = {"message": reason, "type": kind, "param": None, "code": status}
    return json.dumps({"error": content | ({"hint": hint} if hint else {})}).encode()


def build_error_response(
    status: int,
    reason: str,
    retry_after_s: float | None = None,
    headers: Mapping[str, str] | None = None,
    hint: str = "",
) -> Response:
    """Build a complete error response, which is also an ASGI application."""
    own = {} if retry_after_s is None else {"retry-after": str(max(1, ceil(retry_after_s)))}
    own |= {"www-authenticate": "Bearer"} if status == 401 else {}
    content = build_error(status, reason, hint)
    return Response(content, status, {**(headers or {}), **own}, media_type="application/json")


def format_error_event(data: bytes, path: str) -> bytes:
    """Format an error as one server-sent event. Anthropic's clients ignore an event without a name."""
    name = b"event: error\n" if path == "/v1/messages" else b""
    return name + b"data: " + b"\ndata: ".join(data.splitlines() or [b""]) + b"\n\n"


def format_comment(text: str) -> bytes:
    """Format a server-sent event comment, which keeps the connection alive and which clients ignore."""
    return b": " + text.encode() + b"\n\n"


class ClientGoneError(Exception):
    """The client disconnected."""


async def run_while_connected(receive: Receive, work: Callable[[], Any]) -> None:
    """Run `work` as long as the client is connected.

    Raises:
        ClientGoneError: The client disconnected first, and `work` was canceled.
    """
    ours = asyncio.current_task()
    assert ours is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        ours.cancel()

    watcher = asyncio.get_running_loop().create_task(watch())
    try:
        await work()
    except asyncio.CancelledError:
        if gone and not ours.uncancel():
            raise ClientGoneError from None
        raise
    finally:
        watcher.cancel()


_HOP = frozenset(
    b"connection http2-settings keep-alive proxy-authenticate proxy-authorization te trailer trailers transfer-encoding"
    b" upgrade".split()
)
# A client's keys and cookies are meant only for the gateway.
_SECRET = frozenset((b"authorization", b"x-api-key", b"cookie", b"x-coldstart-admin-key"))
_NOT_SENT = _HOP | _SECRET | {b"host", b"content-length", b"x-request-id", b"expect"}
_NOT_PASSED = _HOP | {b"x-request-id", b"server", b"date", b"server-timing"}
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:=/+@-]{1,128}")
# nginx and compatible proxies buffer a response without this header.
UNBUFFERED = (b"x-accel-buffering", b"no")
# Response headers of a stream that begins before its server responds.
STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    UNBUFFERED,
)


def choose_request_id(scope: Scope) -> bytes:
    """Return the client's request ID if it is valid, or a new one otherwise."""
    given: bytes = dict(scope["headers"]).get(b"x-request-id", b"")
    return given if _REQUEST_ID.fullmatch(given) else uuid4().hex.encode()


def filter_request_headers(scope: Scope, request_id: bytes, server_key: str) -> Headers:
    """Return the headers to forward to the server, with this request ID and the server's API key if it has one."""
    named = (value.lower().split(b",") for name, value in scope["headers"] if name == b"connection")
    hop = _NOT_SENT.union(option.strip() for options in named for option in options)
    given = [(name, value) for name, value in scope["headers"] if name not in hop]
    return [*given, *build_auth_header(server_key), (b"x-request-id", request_id)]


def build_auth_header(key: str) -> Headers:
    """Return the Authorization header for a server's own API key, or no header if `key` is empty."""
    return [(b"authorization", b"Bearer " + key.encode())] if key else []


def find_server_key(args: Arguments) -> str:
    """Return the API key that a model server requires, from its arguments or the environment, or "" if it requires none."""
    keys = args.get_value("api_key")
    if isinstance(keys, (list, tuple)):
        keys = keys[0] if keys else None
    return str(keys) if keys else environment.VLLM_API_KEY.read()


def filter_response_headers(headers: Headers, *, streams: bool) -> Headers:
    """Return the headers to forward to the client. If `streams` is set, add a header that disables buffering by proxies."""
    passed = [(name.lower(), value) for name, value in headers if name.lower() not in _NOT_PASSED]
    return [*passed, UNBUFFERED] if streams else passed


def format_timing(replica: Replica, ticket: Ticket, first_s: float | None) -> str:
    """Format the Server-Timing header of a request whose first chunk arrived after `first_s` seconds (None: not yet)."""
    start_s = None if ticket.is_hit else replica.start_s
    marks = (("queued", ticket.queued_s), ("start", start_s), ("first-token", first_s))
    about = {"start": f';desc="{replica.mode}"'} if replica.mode else {}
    return ", ".join(f"{name};dur={s * 1000:.3f}{about.get(name, '')}" for name, s in marks if s is not None)
