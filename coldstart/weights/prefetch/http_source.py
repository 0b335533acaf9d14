"""Byte ranges over HTTP(S), read directly into the caller's buffer (RFC 9110, section 14).

A server that supports ranges answers 206 with the requested Content-Range; any other response is not accepted
as weights. Credentials go only to the origin that they belong to: never to the target of a redirect, and
never in clear text.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from urllib.parse import quote, unquote, urlsplit

from coldstart.artifacts.net import http_client, origin
from coldstart.artifacts.net.http_client import (
    Answer,
    ForbiddenError,
    HttpClient,
    RemoteUnreachableError,
    Secret,
)
from coldstart.contract.environment import PREFETCH_TOKEN
from coldstart.weights.prefetch.range_source import (
    Count,
    SourceTooSlowError,
    SourceUnavailableError,
    SourceUnusableError,
    redact,
)

TOKEN_VARIABLE = PREFETCH_TOKEN
_MAX_REDIRECTS = 5
_PASSING = {408, 425, 429, 500, 502, 503, 504}


def headers(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the Authorization header: user:password@ of the address, else the bearer token of the environment.

    The token is not bound to one source, so it is omitted where it would be sent over plain HTTP. A password
    in the address is meant for this source.

    Raises:
        SourceUnusableError: A password would be sent over plain HTTP.
    """
    parts = urlsplit(address)
    safe = origin.parse_origin(address).may_hear_secrets
    if parts.username:
        if not safe:
            raise SourceUnusableError(
                f"cannot send a password to {redact(address)} without TLS: use https://"
            )
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        return {"Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}
    token = environment.get(TOKEN_VARIABLE)
    return {"Authorization": f"Bearer {token}"} if token and safe else {}


class HttpSource:
    """Files below a base address."""

    def __init__(
        self, base: str, given: Mapping[str, str], locate: Callable[[str], str] | None = None
    ) -> None:
        # The query of a signed address follows the file's name. A login is not part of a request's address.
        path, mark, query = base.partition("?")
        self._locate = locate or (lambda name: f"{path.rstrip('/')}/{quote(name)}{mark}{query}")
        self._headers = dict(given)
        self._moved: dict[str, str] = {}
        self._client = HttpClient()

    def read(self, name: str, size: int, start: int, buffer: memoryview, count: Count) -> int:
        """Implement RangeSource."""
        try:
            with self._range(name, size, start, start + len(buffer)) as answer:
                return _fill(answer, buffer, count)
        except http_client.SlowServerError as error:
            raise SourceTooSlowError(f"{redact(self._locate(name))}: {error.message}") from error
        except RemoteUnreachableError as error:
            raise SourceUnavailableError(f"{redact(self._locate(name))}: {error.message}") from error
        except ForbiddenError as error:
            raise SourceUnusableError(error.message) from error

    def close(self) -> None:
        """Implement RangeSource."""
        self._client.close()

    def _range(self, name: str, size: int, start: int, end: int) -> Answer:
        first = self._locate(name)
        url = self._moved.get(name, first)
        wanted = {"Range": f"bytes={start}-{end - 1}"}
        secret = Secret(origin.parse_origin(first), self._headers) if self._headers else None
        for _ in range(_MAX_REDIRECTS):
            answer = self._client.ask("GET", url, headers=wanted, secret=secret, redirects=False)
            if answer.status == 206:
                _check(answer, redact(url), size, start, end)
                return answer
            answer.close()
            url = self._elsewhere(answer, name, url, first)
            self._moved[name] = url
        raise SourceUnusableError(f"{redact(first)} exceeds {_MAX_REDIRECTS} redirects")

    def _elsewhere(self, answer: Answer, name: str, url: str, first: str) -> str:
        status, location = answer.status, answer.headers.get("Location")
        if status in http_client.REDIRECTS and location:
            return http_client.redirected(url, location)
        # A signed address expires: ask its origin for a new one.
        if self._moved.pop(name, None) is not None or status in _PASSING:
            raise SourceUnavailableError(f"{redact(first)} answers {status}")
        if status == 200:
            raise SourceUnusableError(
                f"{redact(first)} does not serve byte ranges (it answers 200 to a range request)"
            )
        unsent = not self._headers and not origin.parse_origin(first).may_hear_secrets
        hint = f"; over plain HTTP no {TOKEN_VARIABLE} is sent" if unsent and status in (401, 403) else ""
        raise SourceUnusableError(f"{redact(first)} answers {status} {answer.reason}{hint}")


def _fill(answer: Answer, buffer: memoryview, count: Count) -> int:
    filled = 0
    try:
        while filled < len(buffer) and (got := answer.readinto(buffer[filled:])):
            filled += got
            count(got)
    except http_client.SlowServerError:
        raise
    except RemoteUnreachableError:
        if not filled:
            raise
    if not filled:
        raise RemoteUnreachableError("the response is empty")
    return filled


def _check(answer: Answer, url: str, size: int, start: int, end: int) -> None:
    unit, _, rest = answer.headers.get("Content-Range", "").partition(" ")
    span, _, total = rest.partition("/")
    wrong = ""
    if unit != "bytes" or span != f"{start}-{end - 1}":
        wrong = f"answers with {unit[:40]} {rest[:80]!r} to a request for bytes {start}-{end - 1}"
    elif total not in ("*", str(size)):
        wrong = f"has {total[:40]} bytes, but the weights plan has {size}"
    elif answer.headers.get("Content-Encoding", "identity") != "identity":
        wrong = "has a Content-Encoding"
    if wrong:
        answer.close()
        raise SourceUnusableError(f"{url} {wrong}")
