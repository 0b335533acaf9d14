"""Send requests to one model server, using aiohttp.

Invariant: a connection is reused only after a complete response. If a response is not read to its end, its connection is
closed, which makes vLLM abort the request.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import aiohttp

from coldstart.system.ipc import addresses

Header = tuple[bytes, bytes]
CONNECT_S = 10.0
# Shorter than vLLM's keep-alive (5 s), so that no connection is reused while the server closes it.
KEEP_ALIVE_S = 3.0
CROWDED_S = 0.005
# A machine whose network link is cut sends nothing, so its kernel is probed every second and must respond within SILENT_S.
PROBE_S, SILENT_S = 1, 1.9
# A busy server may not read a large request for a while, so such a request gets more time.
LARGE, LARGE_SILENT_S = 1 << 15, 10.0
# Maximum number of streams that migrate to a server at the same time. They pause while they migrate, and more would slow each
# other down. Streams in the queue continue at their source.
MAX_CONCURRENT_MOVES = 2
# Headers that aiohttp must not add: only the client's own headers are forwarded.
_NOT_ADDED = ("accept", "accept-encoding", "content-type", "user-agent")


class NothingSentError(ConnectionError):
    """No server accepted the connection, so nothing was sent."""


class DisconnectedError(ConnectionError):
    """The server disconnected or sent invalid HTTP before its response was complete."""


class AbortedError(DisconnectedError):
    """The server aborted the request when it exited, and returned the tokens generated so far."""


class StreamInterruptedError(Exception):
    """The response was interrupted after all earlier data was delivered. The exchange must continue it on another replica."""


class UpstreamResponse:
    """Response of a server, as a context manager. It waits for the headers on entry, and releases the connection on exit."""

    def __init__(self, upstream: Upstream, pending: asyncio.Task[aiohttp.ClientResponse]) -> None:
        self._upstream, self._pending = upstream, pending
        self._response: aiohttp.ClientResponse | None = None
        self._interrupted = self._waits = False
        self.status = 0
        self.headers: list[Header] = []
        upstream.responses.add(self)

    async def __aenter__(self) -> Self:
        try:
            await asyncio.wait([self._pending])
            if self._interrupted:
                raise StreamInterruptedError
            self._response = _get_response(self._pending)
        except BaseException:
            self.abort()
            raise
        self.status, self.headers = self._response.status, list(self._response.raw_headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    @property
    def is_complete(self) -> bool:
        """Return whether the full response has arrived."""
        return self._response is not None and self._response.content.is_eof()

    async def read_chunk(self) -> bytes:
        """Return the data that has arrived since the last call, or b"" at the end of the response.

        Raises:
            DisconnectedError: The response ended too early.
            StreamInterruptedError: The response was interrupted.
        """
        assert self._response is not None
        content = self._response.content
        self._waits = True
        try:
            if self._interrupted and not content.at_eof():
                if left := content.read_nowait():
                    return left
                raise StreamInterruptedError
            return await content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise _describe(error) from error
        finally:
            self._waits = False

    async def read(self) -> bytes:
        """Return the full response body."""
        parts = []
        while part := await self.read_chunk():
            parts.append(part)
        return b"".join(parts)

    def interrupt(self) -> None:
        """Interrupt this response, so that the exchange continues the stream on another replica."""
        self._interrupted = True
        if self._response is None:
            self._pending.cancel()
        elif self._waits:
            self._response.content.set_exception(StreamInterruptedError())

    def abort(self) -> None:
        """Close the connection unless the response has been read to its end."""
        self._upstream.responses.discard(self)
        if self._response is None:
            self._pending.cancel()
            with suppress(asyncio.CancelledError, asyncio.InvalidStateError, aiohttp.ClientError, OSError):
                self._response = self._pending.result()
        if self._response is not None and not self._response.content.at_eof():
            self._response.close()


def _get_response(pending: asyncio.Task[aiohttp.ClientResponse]) -> aiohttp.ClientResponse:
    try:
        return pending.result()
    except asyncio.CancelledError as error:
        raise DisconnectedError(
            "the server connection was closed before the response was complete"
        ) from error
    except (aiohttp.ClientError, OSError) as error:
        raise _describe(error) from error


def _describe(error: Exception) -> DisconnectedError:
    reason = str(error) or type(error).__name__
    return DisconnectedError(f"the server connection was lost before the response was complete ({reason})")


class Upstream:
    """Connections to the server at `address`, which is a Unix socket or a host and port.

    Idle connections are closed after KEEP_ALIVE_S seconds. `responses` are the responses in progress.
    """

    def __init__(self, address: Path | tuple[str, int], *, connect_s: float = CONNECT_S) -> None:
        self.address, self.connect_s = address, connect_s
        self._base = "http://server" if isinstance(address, Path) else addresses.build_local_url(*address)
        self.responses: set[UpstreamResponse] = set()
        self._sessions: dict[float, aiohttp.ClientSession] = {}
        self._closing: list[asyncio.Task[None]] | None = None

    async def request(
        self, method: str, target: str, *, headers: Iterable[Header] = (), body: bytes = b""
    ) -> UpstreamResponse:
        """Send a request. Enter the returned context manager to wait for the response headers.

        Raises:
            NothingSentError: No server accepted the connection.
        """
        if self._closing is not None:
            raise NothingSentError("cannot send the request: the server has exited")
        session = self._open(LARGE_SILENT_S if len(body) > LARGE else SILENT_S)
        named = [(name.decode("latin-1"), value.decode(errors="replace")) for name, value in headers]
        loop = asyncio.get_running_loop()
        while True:
            sent: asyncio.Future[None] = loop.create_future()
            pending = loop.create_task(
                session.request(
                    method,
                    self._base + target,
                    headers=named,
                    data=body,
                    allow_redirects=False,
                    trace_request_ctx=sent,
                )
            )
            answer, first = UpstreamResponse(self, pending), list[asyncio.Future[Any]]((pending, sent))
            try:
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                answer.abort()
                raise
            if sent.done():
                return answer
            self.responses.discard(answer)
            if pending.cancelled():
                raise NothingSentError("cannot send the request: the server has exited")
            error = pending.exception()
            # Connecting to a Unix socket with a full backlog fails immediately under uvloop, so it is retried.
            if not isinstance(error, OSError) or error.errno != errno.EAGAIN:
                raise NothingSentError(str(error) or "the connection to the server timed out") from error
            await asyncio.sleep(CROWDED_S)

    def _open(self, silent_s: float) -> aiohttp.ClientSession:
        """Return the session whose connections are closed if the other machine is silent for `silent_s` seconds."""
        if silent_s not in self._sessions:
            shared: dict[str, Any] = {"limit": 0, "keepalive_timeout": KEEP_ALIVE_S}
            connector: aiohttp.BaseConnector
            if isinstance(self.address, Path):
                connector = aiohttp.UnixConnector(str(self.address), **shared)
            else:
                connector = aiohttp.TCPConnector(
                    socket_factory=lambda at: _create_socket(at, silent_s), **shared
                )
            trace = aiohttp.TraceConfig()
            trace.on_request_headers_sent.append(_report_sent)
            self._sessions[silent_s] = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.connect_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=_NOT_ADDED,
                trace_configs=[trace],
            )
        return self._sessions[silent_s]

    def close(self) -> None:
        """Abort all connections, including those with a request in progress."""
        for answer in list(self.responses):
            answer.abort()
        if self._closing is None:
            loop = asyncio.get_running_loop()
            self._closing = [loop.create_task(session.close()) for session in self._sessions.values()]


async def _report_sent(session: aiohttp.ClientSession, context: SimpleNamespace, _: Any) -> None:
    sent: asyncio.Future[None] = context.trace_request_ctx
    if not sent.done():
        sent.set_result(None)


def _create_socket(address: Any, silent_s: float) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        made.setsockopt(socket.IPPROTO_TCP, option, PROBE_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * silent_s))
    return made


class Replica:
    """Server of the model `name`, reached over `upstream`. It requires the API key `key` unless that is empty.

    `mode` is its start mode, and `start_s` is the duration of its start in seconds. `send_lock` serializes the sending of
    requests that waited for the same start. `fault` is the reason why the gateway killed the server, or "" if it did not.
    `handover_key` signs messages that migrate streams, or is "" if the server cannot transfer KV.
    """

    def __init__(self, name: str, upstream: Upstream, key: str = "", handover_key: str = "") -> None:
        self.name, self.upstream, self.key, self.handover_key = name, upstream, key, handover_key
        self.mode, self.start_s, self.fault = "", 0.0, ""
        self.move_slots = asyncio.Semaphore(MAX_CONCURRENT_MOVES)
        self.send_lock = asyncio.Lock()
