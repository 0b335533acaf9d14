"""Bodies of requests: read within the limits, and parsed as far as the gateway needs them.

Only the model and whether the answer streams are parsed. The model's server parses the rest.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from coldstart.host.limits import GatewayLimits
from coldstart.host.live.answers import Receive, Scope
from coldstart.host.live.client import ClientGoneError
from coldstart.host.live.json_scan import JsonScan
from coldstart.host.live.shares import Shares


class BodyMemoryFullError(Exception):
    """The bodies of all waiting requests, or of this client's, take the memory that they may take."""


class BodyMemory:
    """Limits of all request bodies of one gateway, and the memory that they use together."""

    def __init__(self, limits: GatewayLimits) -> None:
        self.limits = limits
        total = max(limits.buffered_bytes, limits.body_bytes)
        self.shares = Shares(total, max(total // 2, limits.body_bytes))

    def create_body(self, scope: Scope) -> BoundedBody:
        """Return an empty body for a request."""
        client = scope.get("client")
        return BoundedBody(self, client[0] if client else "")


class BoundedBody:
    """Body of one request. Its size counts towards the gateway's memory until `release`."""

    def __init__(self, memory: BodyMemory, address: str) -> None:
        self._shares, self._address, self._size = memory.shares, address, 0
        self._scan = JsonScan(memory.limits.json_depth, memory.limits.json_members)

    async def read(self, receive: Receive) -> bytes:
        """Return the complete body.

        Raises:
            ClientGoneError: The client disconnected.
            BodyMemoryFullError: No memory is left for the body.
            ValueError: Its JSON exceeds a limit.
        """
        parts = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part = message.get("body", b"")
            if not self._shares.take(self._address, len(part)):
                raise BodyMemoryFullError
            self._size += len(part)
            self._scan.feed(part)
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def release(self) -> None:
        """Drop the body and free its memory."""
        self._shares.release(self._address, self._size)
        self._size = 0


class _Routing(msgspec.Struct):
    """Members of a request that the gateway reads; msgspec skips all others without creating objects."""

    model: str | None = None
    stream: msgspec.Raw = msgspec.Raw(b"")


_ROUTING = msgspec.json.Decoder(_Routing)
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def parse_routing(body: bytes) -> tuple[str | None, bool]:
    """Return the model's name in a request, and whether its answer streams. Raises ValueError for an invalid body."""
    try:
        found = _ROUTING.decode(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the request body is invalid: {error}") from error
    return found.model, bytes(found.stream) == b"true"


def replace_model(body: bytes, model: str) -> bytes:
    """Return the body with another model's name. Raises ValueError for an invalid body."""
    return msgspec.json.encode({**_MEMBERS.decode(body), "model": model})


def parse(body: bytes) -> dict[str, Any]:
    """Return the complete document. Raises ValueError for an invalid body."""
    found = json.loads(body)
    assert isinstance(found, dict)
    return found
