"""Byte ranges over HTTP(S), read straight into the caller's memory.

RFC 9110, section 14: a server that serves ranges answers 206 with the Content-Range that was asked for. Anything else is
not taken for weights. Credentials go to the origin that they were given for, never along a redirect and never in the open.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from time import monotonic
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
    shown,
)

TOKEN_VARIABLE = PREFETCH_TOKEN
# Read at once: as much as comes in a moment, so that a fast source costs few calls and a slow one's progress is seen.
_LEAST, _MOST, _MOMENT_S = 16 << 10, 1 << 20, 0.05
_MAX_REDIRECTS = 5
_PASSING = {408, 425, 429, 500, 502, 503, 504}


def headers(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The Authorization header: from user:password@ in the address, else the bearer token of the environment.

    The token is meant for whatever source it fits, so it is left away where it would go over plain HTTP; a password in the
    address is meant for just that one. Raises SourceUnusableError then.
    """
    parts = urlsplit(address)
    safe = origin.parse_origin(address).may_hear_secrets
    if parts.username:
        if not safe:
            raise SourceUnusableError(
                f"{shown(address)} would be told a password without TLS: write https://"
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
        # A query (a signed address) belongs behind the file's name; a login does not belong into any request's address.
        path, mark, query = base.partition("?")
        self._locate = locate or (lambda name: f"{path.rstrip('/')}/{quote(name)}{mark}{query}")
        self._headers = dict(given)
        self._moved: dict[str, str] = {}
        self._versions: dict[str, str] = {}
        self._client = HttpClient()

    def read(self, name: str, size: int, start: int, buffer: memoryview, count: Count) -> int:
        """As Source."""
        try:
            with self._range(name, size, start, start + len(buffer)) as answer:
                self._versions[name] = answer.headers.get("ETag", "")
                return _fill(answer, buffer, count)
        except http_client.SlowServerError as error:
            raise SourceTooSlowError(f"{shown(self._locate(name))}: {error}") from error
        except RemoteUnreachableError as error:
            raise SourceUnavailableError(f"{shown(self._locate(name))}: {error}") from error
        except ForbiddenError as error:
            raise SourceUnusableError(str(error)) from error

    def version(self, name: str) -> str:
        """As Source: the ETag."""
        return self._versions.get(name, "")

    def close(self) -> None:
        """As Source."""
        self._client.close()

    def _range(self, name: str, size: int, start: int, end: int) -> Answer:
        first = self._locate(name)
        url = self._moved.get(name, first)
        wanted = {"Range": f"bytes={start}-{end - 1}"}
        secret = Secret(origin.parse_origin(first), self._headers) if self._headers else None
        for _ in range(_MAX_REDIRECTS):
            answer = self._client.ask("GET", url, headers=wanted, secret=secret, redirects=False)
            if answer.status == 206:
                _check(answer, shown(url), size, start, end)
                return answer
            answer.close()  # its body is not wanted
            url = self._elsewhere(answer, name, url, first)
            self._moved[name] = url
        raise SourceUnusableError(f"{shown(first)} redirects without an end")

    def _elsewhere(self, answer: Answer, name: str, url: str, first: str) -> str:
        status, location = answer.status, answer.headers.get("Location")
        if status in http_client.REDIRECTS and location:
            return http_client.redirected(url, location)
        # A redirect to a signed address holds for a time only: ask its origin again.
        if self._moved.pop(name, None) is not None or status in _PASSING:
            raise SourceUnavailableError(f"{shown(first)} answers {status}")
        if status == 200:
            raise SourceUnusableError(
                f"{shown(first)} does not serve byte ranges (it answers 200 to a range request)"
            )
        unsent = not self._headers and not origin.parse_origin(first).may_hear_secrets
        hint = f"; over plain HTTP no {TOKEN_VARIABLE} is sent" if unsent and status in (401, 403) else ""
        raise SourceUnusableError(f"{shown(first)} answers {status} {answer.reason}{hint}")


def _fill(answer: Answer, buffer: memoryview, count: Count) -> int:
    filled, step = 0, 4 * _LEAST
    try:
        while filled < len(buffer):
            began = monotonic()
            got = answer.readinto(buffer[filled : filled + step])
            if not got:
                break
            filled += got
            count(got)
            quick = monotonic() - began < _MOMENT_S
            step = min(2 * step, _MOST) if quick else max(step // 2, _LEAST)
    except http_client.SlowServerError:
        raise
    except RemoteUnreachableError:
        if not filled:
            raise
    if not filled:
        raise RemoteUnreachableError("the answer ends before its first byte")
    return filled


def _check(answer: Answer, url: str, size: int, start: int, end: int) -> None:
    unit, _, rest = answer.headers.get("Content-Range", "").partition(" ")
    span, _, total = rest.partition("/")
    wrong = ""
    if unit != "bytes" or span != f"{start}-{end - 1}":
        wrong = f"answers with {unit[:40]} {rest[:80]!r} where bytes {start}-{end - 1} were asked for"
    elif total not in ("*", str(size)):
        wrong = f"has {total[:40]} bytes, the weights plan says {size}"
    elif answer.headers.get("Content-Encoding", "identity") != "identity":
        wrong = "is sent encoded"
    if wrong:
        answer.close()
        raise SourceUnusableError(f"{url} {wrong}")
