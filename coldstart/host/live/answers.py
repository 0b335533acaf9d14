"""Answers of the gateway itself: errors in the OpenAI format that vLLM uses, events, and the client's disconnect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from math import ceil
from typing import Any

from starlette.responses import Response

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


def error(status: int, reason: str, param: str | None = None) -> bytes:
    """Return the JSON body of an error."""
    kind = _TYPES.get(status, "BadRequestError" if status < 500 else "ServiceUnavailableError")
    content = {"message": reason, "type": kind, "param": param, "code": status}
    return json.dumps({"error": content}).encode()


def not_found(reason: str) -> Response:
    """Return a complete 404 response."""
    return refuse(404, reason)


def refuse(
    status: int,
    reason: str,
    retry_after_s: float | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return a complete error response, which is also an ASGI application."""
    retry = {} if retry_after_s is None else {"retry-after": str(max(1, ceil(retry_after_s)))}
    content = error(status, reason)
    return Response(content, status, {**(headers or {}), **retry}, media_type="application/json")


def event(data: bytes) -> bytes:
    """Return `data` as one server-sent event."""
    return b"data: " + b"\ndata: ".join(data.splitlines() or [b""]) + b"\n\n"


def comment(text: str) -> bytes:
    """Return a server-sent-events comment, which keeps the connection alive and which clients ignore."""
    return b": " + text.encode() + b"\n\n"


def timing(marks: Iterable[tuple[str, float | None, str | None]]) -> str:
    """Format a Server-Timing header value from (name, seconds, description); entries with None seconds are omitted."""
    entries = []
    for name, seconds, about in marks:
        if seconds is not None:
            entries.append(f"{name};dur={seconds * 1000:.3f}" + (f';desc="{about}"' if about else ""))
    return ", ".join(entries)


class ClientGoneError(Exception):
    """The client disconnected."""


async def run_while_connected(receive: Receive, work: Callable[[], Any]) -> None:
    """Run `work` while the client is connected.

    Raises:
        ClientGoneError: The client disconnected first; `work` was cancelled.
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
