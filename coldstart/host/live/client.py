"""The client's side of an exchange, as ASGI has it: its body, and its going."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from coldstart.host.live.answers import Receive

MAX_BODY = 64 << 20


class ClientGoneError(Exception):
    """The client went."""


async def read(receive: Receive, limit: int = MAX_BODY) -> bytes:
    """The request's whole body. Raises Gone, and ValueError for more than `limit` bytes."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise ValueError(f"the body has more than {limit} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def with_client(receive: Receive, work: Callable[[], Any]) -> None:
    """Do `work` as long as the client is there. Raises Gone when it went first, after `work` was cancelled."""
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
