"""Minimal HTTP/1.1 client for one server; every token takes this path.

Invariant: a connection carries one exchange at a time; it is reused only after a complete answer that allows it. An
answer that is not read to its end closes its connection, which makes vLLM abort the request.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Self, cast

import httptools

Header = tuple[bytes, bytes]
CONNECT_S = 10.0
# Below vLLM's own keep-alive (5 s): a connection must not be reused just as the server closes it.
KEEP_ALIVE_S = 3.0
CROWDED_S = 0.005
# Unread bytes of an answer with a slow client: reading pauses above this limit and resumes when all were
# read.
MOST_UNREAD = 1 << 16
# A machine whose link is cut sends nothing: its kernel is probed every second and must answer in this time.
ASK_S, SILENT_S = 1, 1.9
# A busy server may leave a large request unread for a while, which must not count as silence.
LARGE, LARGE_SILENT_S = 1 << 15, 10.0


class NothingSentError(ConnectionError):
    """No server accepted the connection: nothing was sent."""


class DisconnectedError(ConnectionError):
    """The server disconnected, or sent invalid HTTP, before its answer was complete."""


class AbortedError(DisconnectedError):
    """The server aborted the request when it ended, and answered with the tokens until then."""


class StreamInterruptedError(Exception):
    """The reader must continue at another server; all data before the interruption was delivered."""


class UpstreamAnswer:
    """One answer, an asynchronous context manager: the headers are complete on entry, the connection is released on exit."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self.status = 0
        self.headers: list[Header] = []
        self.whole = False
        self._pieces: deque[bytes] = deque()
        self._unread = 0
        self._error: DisconnectedError | None = None
        self._interrupted = False
        self._waiter: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        try:
            while not self.status and self._error is None and not self._interrupted:
                await self._wait()
            if not self.status and self._interrupted:
                raise StreamInterruptedError
            if not self.status and self._error is not None:
                raise self._error
        except BaseException:
            self._connection.settle()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.settle()

    async def piece(self) -> bytes:
        """Return the data since the last call; empty at the end.

        Raises:
            DisconnectedError: The answer ended too early.
            StreamInterruptedError: The answer was interrupted.
        """
        while not self._pieces:
            if self.whole:
                return b""
            if self._interrupted:
                raise StreamInterruptedError
            if self._error is not None:
                raise self._error
            await self._wait()
        if len(self._pieces) == 1:
            taken = self._pieces.popleft()
        else:
            taken = b"".join(self._pieces)
            self._pieces.clear()
        if self._unread > MOST_UNREAD and not self._connection.transport.is_closing():
            self._connection.transport.resume_reading()
        self._unread = 0
        return taken

    async def read(self) -> bytes:
        """Return the complete body."""
        parts = []
        while part := await self.piece():
            parts.append(part)
        return b"".join(parts)

    async def _wait(self) -> None:
        self._waiter = self._connection.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """Wake the reader up."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def interrupt(self) -> None:
        """Make the reader continue at another server."""
        self._interrupted = True
        self.wake()

    def fail(self, error: DisconnectedError) -> None:
        """Record that the answer will never be complete."""
        if not self.whole and self._error is None:
            self._error = error
            self.wake()

    @property
    def awaits_bytes(self) -> bool:
        """Return whether its reader waits for the server."""
        return self._waiter is not None

    def take(self, body: bytes) -> None:
        """Append a part of the body."""
        self._pieces.append(body)
        before, self._unread = self._unread, self._unread + len(body)
        if before <= MOST_UNREAD < self._unread and not self._connection.transport.is_closing():
            self._connection.transport.pause_reading()


class _Connection(asyncio.Protocol):
    """Connection that turns bytes into answers."""

    transport: asyncio.Transport

    def __init__(self, upstream: Upstream) -> None:
        self.upstream, self.loop = upstream, asyncio.get_running_loop()
        self._answer: UpstreamAnswer | None = None
        self._parser = self._create_parser()
        self._keeps = self._sized = False
        self._idle: asyncio.TimerHandle | None = None

    def begin(self, request: bytes, body: bytes) -> UpstreamAnswer:
        """Send a request; no other request may be in progress on this connection."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        self._parser, self._sized = self._create_parser(), False
        self._patience(LARGE_SILENT_S if len(body) > LARGE else SILENT_S)
        answer = self._answer = UpstreamAnswer(self)
        self.transport.writelines([request, body] if body else [request])
        return answer

    def _create_parser(self) -> httptools.HttpResponseParser:
        """Create a parser; httptools looks its callbacks up by these names."""
        return httptools.HttpResponseParser(
            SimpleNamespace(
                on_header=self._add_header,
                on_headers_complete=self._read_status,
                on_body=self._add_body,
                on_message_complete=self._complete,
            )
        )

    def settle(self) -> None:
        """Release the connection after its answer was read or abandoned."""
        answer, self._answer = self._answer, None
        if answer is None:
            return
        if answer.whole and self._keeps and not self.transport.is_closing() and self.upstream.keep(self):
            self._idle = self.loop.call_later(KEEP_ALIVE_S, self.transport.close)
        else:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        if self._socket is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                self._socket.setsockopt(socket.IPPROTO_TCP, option, ASK_S)

    @property
    def _socket(self) -> socket.socket | None:
        """Return the TCP socket; None for a unix socket, whose other end is on this machine."""
        found: socket.socket | None = self.transport.get_extra_info("socket")
        return None if found is None or found.family == socket.AF_UNIX else found

    def _patience(self, seconds: float) -> None:
        """Set how long in seconds the other machine may be silent, while it receives or is idle."""
        if self._socket is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))

    @property
    def awaits_bytes(self) -> bool:
        """Return whether the reader of its answer waits for the server."""
        return self._answer is not None and self._answer.awaits_bytes

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            self.transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            answer.fail(DisconnectedError(f"the server sent invalid HTTP: {error}"))
            self.transport.abort()
        answer.wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.upstream.forget(self)
        if self._idle is not None:
            self._idle.cancel()
        if self._answer is not None:
            if self._answer.status and not self._sized and error is None:
                # An answer without a length ends with its connection.
                self._answer.whole = True
                self._answer.wake()
            why = "closed" if error is None else f"lost ({error})"
            self._answer.fail(DisconnectedError(f"the connection was {why} before the answer was complete"))

    def _add_header(self, name: bytes, value: bytes) -> None:
        assert self._answer is not None
        self._answer.headers.append((name, value))
        self._sized = self._sized or name.lower() in (b"content-length", b"transfer-encoding")

    def _read_status(self) -> None:
        assert self._answer is not None
        status = self._parser.get_status_code()
        if status >= 200:
            self._answer.status = status
            self._keeps = bool(self._parser.should_keep_alive())
        else:
            self._answer.headers.clear()

    def _add_body(self, body: bytes) -> None:
        assert self._answer is not None
        self._answer.take(body)

    def _complete(self) -> None:
        assert self._answer is not None
        self._answer.whole = self._answer.status >= 200


class Upstream:
    """Connections to the server at `place`, a unix socket or host and port. An idle one is closed after KEEP_ALIVE_S."""

    def __init__(self, place: Path | tuple[str, int], *, connect_s: float = CONNECT_S) -> None:
        self.place, self.connect_s = place, connect_s
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._closed = False

    @property
    def awaits_bytes(self) -> bool:
        """Return whether a reader waits for the server."""
        return any(connection.awaits_bytes for connection in self._all)

    async def request(
        self,
        method: str,
        target: str,
        *,
        headers: Iterable[Header] = (),
        body: bytes = b"",
    ) -> UpstreamAnswer:
        """Send a request, and return when it is on its way. Enter the answer to wait for its headers.

        Raises:
            NothingSentError: No server accepted the connection.
            DisconnectedError: The server disconnected. Both are OSErrors.
        """
        lines = [f"{method} {target} HTTP/1.1\r\nhost: server\r\ncontent-length: {len(body)}".encode("ascii")]
        lines += [name + b": " + value for name, value in headers]
        connection = await self._connection()
        return connection.begin(b"\r\n".join(lines) + b"\r\n\r\n", body)

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                return connection
        loop = asyncio.get_running_loop()
        while True:
            # A unix socket with a full backlog fails at once and nothing was sent, so the connection is tried
            # again.
            # (uvloop reports this; asyncio's own loop takes such a socket for connected.)
            try:
                async with asyncio.timeout(self.connect_s):
                    connection = await self._connect(loop)
            except OSError as error:  # includes TimeoutError
                if error.errno != errno.EAGAIN:
                    raise NothingSentError(str(error) or "the server did not answer in time") from error
            else:
                self._all.add(connection)
                return connection
            await asyncio.sleep(CROWDED_S)

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> _Connection:
        if isinstance(self.place, Path):
            return (await loop.create_unix_connection(lambda: _Connection(self), str(self.place)))[1]
        return (await loop.create_connection(lambda: _Connection(self), *self.place))[1]

    def keep(self, connection: _Connection) -> bool:
        """Return whether the connection will be used again."""
        if not self._closed:
            self._idle.append(connection)
        return not self._closed

    def forget(self, connection: _Connection) -> None:
        """Forget a closed connection."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Abort all connections, including those with a request in progress."""
        self._closed = True
        self._idle.clear()
        for connection in list(self._all):
            connection.transport.abort()


class Replica:
    """A server that answers for the model `name` over `upstream`, and requires the API key `key` if it is not empty.

    `mode` is its start mode, `start_s` the duration of its start in seconds. Requests that waited together are sent one
    after another, under the lock `order`. `fault` is why the host ended it, for its requests; empty if it did not.
    """

    def __init__(self, name: str, upstream: Upstream, key: str = "") -> None:
        self.name, self.upstream, self.key = name, upstream, key
        self.mode, self.start_s, self.fault = "", 0.0, ""
        self.order = asyncio.Lock()
