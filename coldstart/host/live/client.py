"""Client side of an exchange in ASGI: reads the body and watches for a disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from coldstart.host.live.answers import Receive

MAX_BODY = 64 << 20


class ClientGoneError(Exception):
    """The client disconnected."""


async def read(receive: Receive, limit: int = MAX_BODY) -> bytes:
    """Return the complete request body. Raises ClientGoneError, and ValueError for more than `limit` bytes."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise ValueError(f"the request body has more than {limit} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


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
