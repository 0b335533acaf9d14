"""HTTP/1.1 protocol of a client connection, with limits and checks that uvicorn's own protocol lacks.

This module limits the size and number of headers, the size of a body, the time until headers and body are complete,
pipelined requests, and the number of connections. The kernel closes the connection of a client that does not read
(TCP_USER_TIMEOUT). This module does not parse bodies.

A request is rejected and its connection closed if a proxy in front could interpret its end, host or key differently
(request smuggling). Headers after the body (trailers) are ignored.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from coldstart.host.endpoint import GatewayLimits
from coldstart.host.live import messages
from coldstart.host.live.access_control import KEY_HEADERS

# Headers that a request must not repeat.
_SINGLE = (b"host", b"origin", b"content-length", b"transfer-encoding", b"upgrade", *KEY_HEADERS)
# Upgrades that HTTP libraries offer by default on plain connections: h2c (Java, curl) and TLS (Apache). They are ignored.
_OFFERS = (b"h2c", b"tls/1.2")
MAX_PIPELINED = 16
MAX_UNSENT = 128 << 10


class _LimitExceededError(Exception):
    """Error for a request that exceeds a limit. Callbacks of the parser raise it in order to stop the parser."""


class BoundedProtocol(HttpToolsProtocol):
    """Connection of one client. At most `connections` clients can connect at a time. httptools calls the `on_*` methods.

    `refused` counts the error responses that this class sends, by HTTP status.
    """

    def __init__(
        self, limits: GatewayLimits, connections: int, refused: Counter[int], **uvicorns: Any
    ) -> None:
        super().__init__(**uvicorns)
        self._limits, self._most_connections, self._refused = limits, connections, refused
        self._deadline: asyncio.TimerHandle | None = None
        self._refusal = (400, "the request is not valid HTTP")
        # Bytes received since the parser last completed headers, a part of a body, or a message.
        self._unparsed = 0
        self._body_bytes = 0
        self._in_head = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]  # uvicorn narrows the type
        # If a client does not read, the kernel buffers only a few bytes and closes the connection after a while.
        client, write_ms = transport.get_extra_info("socket"), round(1000 * self._limits.write_s)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, write_ms))
        if len(self.connections) > self._most_connections:
            self._end(503, "too many connections are open")
        else:
            self._expect("headers", self._limits.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._expect("headers", self._limits.head_s)
        self._unparsed += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._unparsed > self._limits.head_bytes and not self.transport.is_closing():
            self._end(431, self._describe_head_limit())

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                data = b""
            except httptools.HttpParserError:
                self._end(*self._refusal)
                data = b""
            except httptools.HttpParserUpgrade as offer:
                # The parser would treat the body as the next request, so it gets the head again without the upgrade.
                kept = [b"%b: %b\r\n" % one for one in self.headers if one[0] != b"upgrade"]
                head = b"%b %b HTTP/1.1\r\n%b\r\n" % (self.parser.get_method(), self.url, b"".join(kept))
                data = head + data[offer.args[0] :]

    def on_message_begin(self) -> None:
        self._body_bytes = 0
        self._in_head = True
        if self._deadline is None:
            self._expect("headers", self._limits.head_s)
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse(429, f"more than {MAX_PIPELINED} pipelined requests are waiting on this connection")
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # not a trailer
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unparsed = 0
        self._in_head = False
        head_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if head_bytes > self._limits.head_bytes:
            self._refuse(431, self._describe_head_limit())
        if (fault := self._find_fault()) is not None:
            self._refuse(400, fault)
        if self.parser.should_upgrade():
            return
        self._expect("body", self._limits.body_s)
        for name, value in self.headers:
            if name == b"content-length" and value.isdigit():
                self._check_body(int(value[:20]))
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        self._body_bytes += len(body)
        self._check_body(self._body_bytes)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._unparsed = 0
        self._clear_deadline()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.cycle.more_body and self.cycle.response_complete and not self.pipeline:
            # Discard the rest of the body for a limited time, so that the client can read the response.
            self._expect("body", self._limits.head_s)
        super().on_response_complete()

    def _find_fault(self) -> str | None:
        """Return why the head of a request is ambiguous or unsupported, or None if it is valid."""
        names = [name for name, _ in self.headers]
        given = {name: value.strip().lower() for name, value in self.headers}
        version, host = self.parser.get_http_version(), given.get(b"host")
        for name in _SINGLE:
            if names.count(name) > 1:
                return f"the request has more than one {name.decode()} header"
        if version not in ("1.0", "1.1") or self.parser.get_method() == b"CONNECT":
            return "the gateway supports only HTTP/1.0 and HTTP/1.1, and no CONNECT requests"
        if version == "1.1" and host is None:
            return "the request has no Host header"
        authority = self.url.partition(b"://")[2].partition(b"/")[0].partition(b"?")[0].lower()
        if not self.url.startswith(b"/") and authority != host:
            return "the request target is neither a path nor a URL with the host of the Host header"
        if version == "1.0" and (b"transfer-encoding" in given or self.parser.should_upgrade()):
            return "HTTP/1.0 supports neither the Transfer-Encoding nor the Upgrade header"
        if given.get(b"transfer-encoding", b"chunked") != b"chunked":
            return "the request has a Transfer-Encoding other than chunked"
        if self.parser.should_upgrade() and given[b"upgrade"] not in _OFFERS:
            return "the gateway does not support protocol upgrades"
        return None

    def _describe_head_limit(self) -> str:
        return f"the request headers exceed the limit of {self._limits.head_bytes} bytes"

    def _check_body(self, size: int) -> None:
        if size > self._limits.body_bytes:
            self._refuse(413, f"the request body exceeds the limit of {self._limits.body_bytes} bytes")

    def _refuse(self, status: int, reason: str) -> None:
        """Stop the parser, and make `_parse` send an error response with this HTTP status and reason."""
        self._refusal = status, reason
        raise _LimitExceededError(reason)

    def _expect(self, part: str, seconds: float) -> None:
        self._clear_deadline()
        reason = f"the request {part} did not arrive within {seconds:g} s"
        self._deadline = self.loop.call_later(seconds, self._end, 408, reason)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_answering(self) -> bool:
        """Return whether a response has begun, or whether an earlier request on this connection is waiting for one."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return False
        return cycle.response_started or not cycle.more_body or bool(self.pipeline)

    def _end(self, status: int, reason: str) -> None:
        self._clear_deadline()
        if self.transport.is_closing():
            return
        if self._is_answering():
            self.transport.abort()
            return
        self._refused[status] += 1
        body = messages.build_error(status, reason)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()
