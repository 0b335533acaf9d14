"""Store the headers of the HTTP request that vLLM's API server is handling in the current task, for `--deadline-classes`.

vLLM loads the middleware through `--middleware`, even if it does not use coldstart's engine client.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from coldstart.scheduling.classes import Header

HEADERS: ContextVar[Sequence[Header]] = ContextVar("headers", default=())


class KeepHeaders:
    """ASGI middleware that makes the headers of a request available to all code in the request's task."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            HEADERS.set(scope["headers"])
        await self._app(scope, receive, send)
