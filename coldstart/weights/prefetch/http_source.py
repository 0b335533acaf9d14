"""Byte ranges over HTTP(S), one kept-alive connection per host, read straight into the caller's memory.

RFC 9110, section 14: a server that serves ranges answers 206 with the Content-Range that was asked for. Anything else is
not taken for weights. Credentials go to the origin that they were given for, never along a redirect to another.
"""

from __future__ import annotations

import base64
import http.client
from collections.abc import Callable, Mapping
from urllib.parse import quote, unquote, urljoin, urlsplit

from coldstart.contract.environment import PREFETCH_TOKEN
from coldstart.weights.prefetch.sources import Count, Unavailable, Unusable, shown

TOKEN_VARIABLE = PREFETCH_TOKEN
TIMEOUT_S = 30.0
_SLICE = 1 << 20
_MAX_REDIRECTS = 5
_PASSING = {408, 425, 429, 500, 502, 503, 504}


def headers(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The Authorization header: from user:password@ in the address, else the bearer token of the environment."""
    parts = urlsplit(address)
    if parts.username:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        return {"Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}
    token = environment.get(TOKEN_VARIABLE)
    return {"Authorization": f"Bearer {token}"} if token else {}


class HttpSource:
    """Files below a base address."""

    def __init__(
        self, base: str, given: Mapping[str, str], locate: Callable[[str], str] | None = None
    ) -> None:
        # A query (a signed address) belongs behind the file's name.
        path, mark, query = base.partition("?")
        self._locate = locate or (lambda name: f"{path.rstrip('/')}/{quote(name)}{mark}{query}")
        self._headers = dict(given)
        self._moved: dict[str, str] = {}
        self._connections: dict[tuple[str, str], http.client.HTTPConnection] = {}

    def read(self, name: str, size: int, start: int, into: memoryview, count: Count) -> int:
        """As Source."""
        try:
            response = self._range(name, size, start, start + len(into))
            return _fill(response, into, count)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise Unavailable(f"{shown(self._locate(name))}: {error or type(error).__name__}") from error

    def close(self) -> None:
        """As Source."""
        while self._connections:
            self._connections.popitem()[1].close()

    def _range(self, name: str, size: int, start: int, end: int) -> http.client.HTTPResponse:
        origin = self._locate(name)
        url = self._moved.get(name, origin)
        for _ in range(_MAX_REDIRECTS):
            response = self._get(url, origin, start, end)
            if response.status == 206:
                _check(response, shown(url), size, start, end)
                return response
            self.close()  # its body is not wanted
            url = self._elsewhere(response, name, url, origin)
            self._moved[name] = url
        raise Unusable(f"{shown(origin)} redirects without an end")

    def _elsewhere(self, response: http.client.HTTPResponse, name: str, url: str, origin: str) -> str:
        status, location = response.status, response.getheader("Location")
        if status in (301, 302, 303, 307, 308) and location:
            target = urljoin(url, location)
            if urlsplit(url).scheme == "https" and urlsplit(target).scheme != "https":
                raise Unusable(f"{shown(url)} redirects to an address without TLS")
            return target
        # A redirect to a signed address holds for a time only: ask its origin again.
        if self._moved.pop(name, None) is not None or status in _PASSING:
            raise Unavailable(f"{shown(origin)} answers {status}")
        if status == 200:
            raise Unusable(f"{shown(origin)} does not serve byte ranges (it answers 200 to a range request)")
        raise Unusable(f"{shown(origin)} answers {status} {response.reason}")

    def _get(self, url: str, origin: str, start: int, end: int) -> http.client.HTTPResponse:
        parts = urlsplit(url)
        own = {"Range": f"bytes={start}-{end - 1}"}
        if (parts.scheme, parts.netloc) == urlsplit(origin)[:2]:
            own |= self._headers
        connection = self._connection(parts.scheme, parts.netloc.rpartition("@")[2])
        connection.request(
            "GET", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), headers=own
        )
        return connection.getresponse()

    def _connection(self, scheme: str, host: str) -> http.client.HTTPConnection:
        known = self._connections.get((scheme, host))
        if known is None:
            if scheme not in ("http", "https"):
                raise Unusable(f"a redirect to {scheme}://{host}")
            kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
            known = self._connections[scheme, host] = kind(host, timeout=TIMEOUT_S)
        return known


def _fill(response: http.client.HTTPResponse, into: memoryview, count: Count) -> int:
    filled = 0
    try:
        while filled < len(into):
            got = response.readinto(into[filled : filled + _SLICE])
            if not got:
                break
            filled += got
            count(got)
    except (OSError, http.client.HTTPException):
        if not filled:
            raise
    if not filled:
        raise http.client.IncompleteRead(b"", len(into))
    if filled < len(into):
        response.close()
    return filled


def _check(response: http.client.HTTPResponse, url: str, size: int, start: int, end: int) -> None:
    unit, _, rest = (response.getheader("Content-Range") or "").partition(" ")
    span, _, total = rest.partition("/")
    if unit != "bytes" or span != f"{start}-{end - 1}":
        raise Unusable(f"{url} answers with {unit} {rest!r} where bytes {start}-{end - 1} were asked for")
    if total not in ("*", str(size)):
        raise Unusable(f"{url} has {total} bytes, the weights plan says {size}")
    if response.getheader("Content-Encoding", "identity") != "identity":
        raise Unusable(f"{url} is sent encoded")
