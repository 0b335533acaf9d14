"""Client side of an exchange in ASGI: watches for a disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from coldstart.host.live.answers import Receive


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
