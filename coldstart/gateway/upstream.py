"""The connections to one server that answers requests, wherever it is."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import aiohttp

# Below vLLM's own (5 s): a connection must not be taken just as the other side closes it.
KEEP_ALIVE_S = 3.0
CROWDED_S = 0.005


async def _on_sent(session: aiohttp.ClientSession, context: Any, params: Any) -> None:
    context.trace_request_ctx()


class Upstream:
    """A server of the model `name` at the end of `connector`; `base` is what stands before a path.

    `mode` is how it was started, `start_s` how long that took. `tail` is done when the last of those that waited together was
    sent.
    """

    def __init__(
        self,
        name: str,
        connector: aiohttp.BaseConnector,
        base: str = "http://server",
        *,
        connect_s: float = 10.0,
    ) -> None:
        self.name, self.base = name, base
        self.mode, self.start_s = "", 0.0
        self.tail: asyncio.Future[None] | None = None
        settings: dict[str, Any] = {
            "connector": connector,
            "timeout": aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
            "auto_decompress": False,
            "skip_auto_headers": ("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            "cookie_jar": aiohttp.DummyCookieJar(),
        }
        self.session = aiohttp.ClientSession(**settings)
        watch = aiohttp.TraceConfig()
        watch.on_request_chunk_sent.append(_on_sent)
        self._watched = aiohttp.ClientSession(**settings, connector_owner=False, trace_configs=[watch])

    async def request(
        self, method: str, path: str, *, sent: Callable[[], None] | None = None, **options: Any
    ) -> aiohttp.ClientResponse:
        """As the session's. A server whose queue of connections is full is asked again: a unix socket fails at once there.

        Nothing was sent then. (uvloop says so; asyncio's own loop takes such a socket for connected.) `sent` is called when the
        body is on its way. Raises aiohttp.ClientError, OSError.
        """
        session = self.session if sent is None else self._watched
        while True:
            try:
                return await session.request(method, f"{self.base}{path}", trace_request_ctx=sent, **options)
            except aiohttp.ClientConnectorError as error:
                if error.os_error.errno != errno.EAGAIN:
                    raise
            await asyncio.sleep(CROWDED_S)

    async def close(self) -> None:
        """Close what is open."""
        with suppress(Exception):
            await self._watched.close()
            await self.session.close()
