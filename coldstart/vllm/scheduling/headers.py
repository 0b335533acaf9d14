"""Headers of the request that vLLM's API server answers in the present task, for the classes of `--scheduler deadline`.

vLLM loads the class through its own `--middleware`, also where another version replaced what reads the headers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from coldstart.scheduling.classes import Header

HEADERS: ContextVar[Sequence[Header]] = ContextVar("headers", default=())


class KeepHeaders:
    """ASGI middleware that keeps the headers of a request for all that its task calls."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            HEADERS.set(scope["headers"])
        await self._app(scope, receive, send)
