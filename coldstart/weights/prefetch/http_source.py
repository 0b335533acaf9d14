"""Byte ranges over HTTP(S), read into the caller's buffer (RFC 9110, section 14): HTTP servers and the Hugging Face Hub.

Credentials are sent only to the origin that they belong to: never to the target of a redirect, and never in clear text.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from urllib.parse import quote, unquote, urlsplit

from coldstart.artifacts.net import http_client
from coldstart.artifacts.net.http_client import ForbiddenError, RemoteUnreachableError
from coldstart.artifacts.net.origin import parse_origin
from coldstart.contract.environment import HF_ENDPOINT, HF_TOKEN, PREFETCH_TOKEN
from coldstart.weights.prefetch.sources import (
    Count,
    SourceTooSlowError,
    SourceUnavailableError,
    SourceUnusableError,
    redact_address,
)

_HUB = "https://huggingface.co"
_PASSING = {408, 425, 429, 500, 502, 503, 504}


def open_http_source(address: str, environment: Mapping[str, str]) -> HttpSource:
    """Open http(s)://... or hf://owner/name@revision with the credentials in `environment`. Raises SourceUnusableError."""
    if not address.startswith("hf://"):
        return HttpSource(address, headers(address, environment))
    from huggingface_hub import get_token, hf_hub_url

    repository, _, revision = address.partition("://")[2].partition("@")
    endpoint, token = HF_ENDPOINT.read(environment) or None, HF_TOKEN.read(environment) or get_token()
    safe = parse_origin(endpoint or _HUB).can_receive_secrets
    return HttpSource(
        address,
        {"Authorization": f"Bearer {token}"} if token and safe else {},
        lambda name: hf_hub_url(repository, name, revision=revision or None, endpoint=endpoint),
    )


def headers(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the Authorization header, from user:password@ in the address or else from the bearer token in the environment.

    The token is not specific to one source, so it is omitted where it would be sent over plain HTTP. A password in the
    address is meant for this source, so there it causes an error.

    Raises:
        SourceUnusableError: A password would be sent over plain HTTP.
    """
    parts = urlsplit(address)
    safe = parse_origin(address).can_receive_secrets
    if parts.username:
        if not safe:
            raise SourceUnusableError(
                f"cannot send a password to {redact_address(address)} without TLS: use https://"
            )
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        return {"Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}
    token = environment.get(PREFETCH_TOKEN)
    return {"Authorization": f"Bearer {token}"} if token and safe else {}


class HttpSource:
    """Source that requests byte ranges of files below a base address, or at the address that `locate` returns for a file.

    A server that supports ranges responds with status 206 and the requested Content-Range. Any other response is rejected
    (RFC 9110, section 14).
    """

    def __init__(
        self, base: str, given: Mapping[str, str], locate: Callable[[str], str] | None = None
    ) -> None:
        # The query of a signed address follows the file's name. A login is not part of a request's address.
        path, mark, query = base.partition("?")
        self._locate = locate or (lambda name: f"{path.rstrip('/')}/{quote(name)}{mark}{query}")
        self._headers = dict(given)
        self._moved: dict[str, str] = {}
        self._client = http_client.HttpClient()

    def read(self, name: str, size: int, start: int, buffer: memoryview, count: Count) -> int:
        first, filled = self._locate(name), 0
        try:
            with self._ask(name, first, start, start + len(buffer)) as answer:
                if wrong := _find_fault(answer.headers, size, start, start + len(buffer)):
                    raise SourceUnusableError(f"{redact_address(answer.url)} {wrong}")
                while filled < len(buffer) and (got := answer.readinto(buffer[filled:])):
                    filled += got
                    count(got)
        except http_client.SlowServerError as error:
            raise SourceTooSlowError(f"cannot fetch {redact_address(first)}: {error.message}") from error
        except RemoteUnreachableError as error:
            if not filled:
                raise SourceUnavailableError(
                    f"cannot fetch {redact_address(first)}: {error.message}"
                ) from error
        except ForbiddenError as error:
            raise SourceUnusableError(error.message) from error
        if not filled:
            raise SourceUnavailableError(f"cannot fetch {redact_address(first)}: the response is empty")
        return filled

    def close(self) -> None:
        self._client.close()

    def _ask(self, name: str, first: str, start: int, end: int) -> http_client.HttpResponse:
        """Request bytes [start, end), and return the response with status 206. Remember its redirects for later requests."""
        secret = http_client.Secret(parse_origin(first), self._headers) if self._headers else None
        wanted = {"Range": f"bytes={start}-{end - 1}"}
        answer = self._client.request("GET", self._moved.get(name, first), headers=wanted, secret=secret)
        if answer.status == 206:
            self._moved[name] = answer.url
            return answer
        answer.close()
        known, status = self._moved.pop(name, first), answer.status
        # A signed address expires: request a new one from its origin.
        if known != first or status in _PASSING:
            raise SourceUnavailableError(f"{redact_address(first)} returned HTTP status {status}")
        if status == 200:
            raise SourceUnusableError(
                f"{redact_address(first)} does not serve byte ranges (it returned HTTP status 200 for a range request)"
            )
        unsent = not self._headers and not parse_origin(first).can_receive_secrets and status in (401, 403)
        hint = f"; {PREFETCH_TOKEN} is not sent over plain HTTP" if unsent else ""
        raise SourceUnusableError(
            f"{redact_address(first)} returned HTTP status {status} {answer.reason}{hint}"
        )


def _find_fault(given: Mapping[str, str], size: int, start: int, end: int) -> str:
    """Return the fault if the headers of a response with status 206 do not describe bytes [start, end) of a file, or ""."""
    unit, _, rest = given.get("Content-Range", "").partition(" ")
    span, _, total = rest.partition("/")
    if unit != "bytes" or span != f"{start}-{end - 1}":
        return f"returned the range {unit[:40]} {rest[:80]!r} for a request of bytes {start}-{end - 1}"
    if total not in ("*", str(size)):
        return f"has {total[:40]} bytes, but the weights plan expects {size}"
    return "returned a Content-Encoding" if given.get("Content-Encoding", "identity") != "identity" else ""
