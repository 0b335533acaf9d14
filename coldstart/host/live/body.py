"""Bodies of requests: read within the limits, and parsed as far as the gateway needs them.

Only the model and whether the answer streams are parsed. The model's server parses the rest.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from coldstart.host.endpoint import GatewayLimits
from coldstart.host.live.answers import ClientGoneError, Receive

T = TypeVar("T")


class BodyMemoryFullError(Exception):
    """The bodies of all waiting requests take the memory that they may take."""


class BodyMemory:
    """Memory in bytes that all request bodies of one gateway use together, and its limit."""

    def __init__(self, limits: GatewayLimits) -> None:
        self.total = max(limits.buffered_bytes, limits.body_bytes)
        self.used = 0

    def create_body(self) -> BoundedBody:
        """Return an empty body for a request."""
        return BoundedBody(self)


class BoundedBody:
    """Body of one request. Its size counts towards the gateway's memory until `release`."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory, self._size = memory, 0

    async def read(self, receive: Receive) -> bytes:
        """Return the complete body.

        Raises:
            ClientGoneError: The client disconnected.
            BodyMemoryFullError: No memory is left for the body.
        """
        parts = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part = message.get("body", b"")
            if self._memory.used + len(part) > self._memory.total:
                raise BodyMemoryFullError
            self._memory.used += len(part)
            self._size += len(part)
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def release(self) -> None:
        """Drop the body and free its memory."""
        self._memory.used -= self._size
        self._size = 0


class _Routing(msgspec.Struct):
    """Members of a request that the gateway reads; msgspec skips all others without creating objects."""

    model: str | None = None
    stream: msgspec.Raw = msgspec.Raw(b"")


_ROUTING = msgspec.json.Decoder(_Routing)
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def parse_routing(body: bytes) -> tuple[str | None, bool]:
    """Return the model's name in a request, and whether its answer streams. Raises ValueError for an invalid body."""
    found = _decoded(_ROUTING.decode, body)
    return found.model, bytes(found.stream) == b"true"


def replace_model(body: bytes, model: str) -> bytes:
    """Return the body with another model's name. Raises ValueError for an invalid body."""
    return msgspec.json.encode({**_decoded(_MEMBERS.decode, body), "model": model})


def parse(body: bytes) -> dict[str, Any]:
    """Return the complete document. Raises ValueError for an invalid body."""
    found = _decoded(json.loads, body)
    assert isinstance(found, dict)
    return found


def _decoded(decode: Callable[[bytes], T], body: bytes) -> T:
    try:
        return decode(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the request body is invalid: {error}") from error
