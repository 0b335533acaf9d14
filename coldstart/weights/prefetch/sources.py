"""Sources of weights, which read byte ranges of named files: directory, HTTP server, Hugging Face Hub, S3-compatible store.

Each stream opens its own source, so a source need not be thread-safe. SourceUnavailableError is temporary and the read is
retried; SourceUnusableError is permanent. Credentials go only to the origin that they belong to: never to the target of
a redirect, and never in clear text.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote, urlsplit

from coldstart.artifacts import files
from coldstart.artifacts.net import http_client
from coldstart.artifacts.net.http_client import ForbiddenError, RemoteUnreachableError
from coldstart.artifacts.net.origin import parse_origin, redact_url
from coldstart.contract.environment import (
    AWS_ENDPOINT,
    AWS_ENDPOINT_URL,
    HF_ENDPOINT,
    HF_TOKEN,
    PREFETCH_TOKEN,
)
from coldstart.system import paths

SCHEMES = ("http", "https", "s3", "hf")
Count = Callable[[int], None]
_HUB = "https://huggingface.co"
_PASSING = {408, 425, 429, 500, 502, 503, 504}


class SourceUnavailableError(Exception):
    """The source did not answer or closed the connection; a retry may succeed."""


class SourceTooSlowError(SourceUnavailableError):
    """The source sends fewer bytes per second than the minimum; it is not retried at once."""


class SourceUnusableError(Exception):
    """The source answers with a permanent error: no such file, no byte ranges, another size or no permission."""


class RangeSource(Protocol):
    """Source of byte ranges of files."""

    def read(self, name: str, size: int, start: int, buffer: memoryview, count: Count) -> int:
        """Fill `buffer` from byte `start` of file `name`; return how many bytes arrived before the connection ended.

        Args:
            name: File name.
            size: Size of the file in bytes.
            start: Offset of the first byte.
            buffer: Memory for the bytes.
            count: Called with each number of received bytes.

        Raises:
            SourceUnavailableError: No byte arrived.
            SourceUnusableError: The source cannot provide the range.
        """

    def close(self) -> None:
        """Close the connections."""


def is_local(address: str) -> bool:
    """Return whether the address is a directory of this machine."""
    return address.partition("://")[0] not in SCHEMES


def normalise(address: str) -> str:
    """Return the address in the prefetcher's form: absolute for a directory, otherwise without a trailing slash."""
    return str(paths.expand(address).absolute()) if is_local(address) else address.rstrip("/")


def redact(address: str) -> str:
    """Return the address for messages: without a login, and without the query, which may be a signature."""
    return address if is_local(address) else redact_url(address)


def open_source(address: str, environment: Mapping[str, str]) -> RangeSource:
    """Open a source for one stream; `environment` has the client's credentials. Raises SourceUnusableError."""
    scheme = address.partition("://")[0]
    if scheme in ("http", "https"):
        return HttpSource(address, headers(address, environment))
    if scheme == "s3":
        return ObjectSource(address, environment)
    return _open_hub(address, environment) if scheme == "hf" else LocalSource(Path(address))


class LocalSource:
    """Local directory, read into the page cache, which is the copy that all clients map."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: dict[str, int] = {}

    def read(self, name: str, size: int, start: int, buffer: memoryview, count: Count) -> int:
        """Implement RangeSource."""
        path = self.directory / name
        try:
            if name not in self._open:
                self._open[name] = files.open_descriptor(path)
            descriptor = self._open[name]
            if (actual := os.fstat(descriptor).st_size) != size:
                raise SourceUnusableError(f"{path} has {actual} bytes, but the weights plan has {size}")
            # Ask the disk for the full range at once: the kernel's readahead would send many short requests.
            os.posix_fadvise(descriptor, start, len(buffer), os.POSIX_FADV_WILLNEED)
            got = os.preadv(descriptor, [buffer], start)
        except OSError as error:
            raise SourceUnusableError(f"{path}: {error.strerror}") from error
        if not got:
            raise SourceUnusableError(f"{path} became shorter while it was read")
        count(got)
        return got

    def close(self) -> None:
        """Implement RangeSource."""
        while self._open:
            os.close(self._open.popitem()[1])


def headers(address: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the Authorization header: user:password@ of the address, else the bearer token of the environment.

    The token is not bound to one source, so it is omitted where it would be sent over plain HTTP. A password
    in the address is meant for this source.

    Raises:
        SourceUnusableError: A password would be sent over plain HTTP.
    """
    parts = urlsplit(address)
    safe = parse_origin(address).may_hear_secrets
    if parts.username:
        if not safe:
            raise SourceUnusableError(
                f"cannot send a password to {redact(address)} without TLS: use https://"
            )
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        return {"Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}
    token = environment.get(PREFETCH_TOKEN)
    return {"Authorization": f"Bearer {token}"} if token and safe else {}


class HttpSource:
    """Files below a base address, or at the address that `locate` returns (RFC 9110, section 14).

    A server that supports ranges answers 206 with the requested Content-Range; any other response is not accepted as weights.
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
        """Implement RangeSource."""
        first, filled = self._locate(name), 0
        try:
            with self._ask(name, first, start, start + len(buffer)) as answer:
                if wrong := _find_fault(answer.headers, size, start, start + len(buffer)):
                    raise SourceUnusableError(f"{redact(answer.url)} {wrong}")
                while filled < len(buffer) and (got := answer.readinto(buffer[filled:])):
                    filled += got
                    count(got)
        except http_client.SlowServerError as error:
            raise SourceTooSlowError(f"{redact(first)}: {error.message}") from error
        except RemoteUnreachableError as error:
            if not filled:
                raise SourceUnavailableError(f"{redact(first)}: {error.message}") from error
        except ForbiddenError as error:
            raise SourceUnusableError(error.message) from error
        if not filled:
            raise SourceUnavailableError(f"{redact(first)}: the response is empty")
        return filled

    def close(self) -> None:
        """Implement RangeSource."""
        self._client.close()

    def _ask(self, name: str, first: str, start: int, end: int) -> http_client.Answer:
        """Request bytes [start, end) and return the response with status 206; later requests skip its redirects."""
        secret = http_client.Secret(parse_origin(first), self._headers) if self._headers else None
        wanted = {"Range": f"bytes={start}-{end - 1}"}
        answer = self._client.ask("GET", self._moved.get(name, first), headers=wanted, secret=secret)
        if answer.status == 206:
            self._moved[name] = answer.url
            return answer
        answer.close()
        known, status = self._moved.pop(name, first), answer.status
        # A signed address expires: ask its origin for a new one.
        if known != first or status in _PASSING:
            raise SourceUnavailableError(f"{redact(first)} answers {status}")
        if status == 200:
            raise SourceUnusableError(
                f"{redact(first)} does not serve byte ranges (it answers 200 to a range request)"
            )
        unsent = not self._headers and not parse_origin(first).may_hear_secrets and status in (401, 403)
        hint = f"; over plain HTTP no {PREFETCH_TOKEN} is sent" if unsent else ""
        raise SourceUnusableError(f"{redact(first)} answers {status} {answer.reason}{hint}")


def _find_fault(given: Mapping[str, str], size: int, start: int, end: int) -> str:
    """Return why the headers of a response with status 206 are not those of bytes [start, end) of a file; "" if they are."""
    unit, _, rest = given.get("Content-Range", "").partition(" ")
    span, _, total = rest.partition("/")
    if unit != "bytes" or span != f"{start}-{end - 1}":
        return f"answers with {unit[:40]} {rest[:80]!r} to a request for bytes {start}-{end - 1}"
    if total not in ("*", str(size)):
        return f"has {total[:40]} bytes, but the weights plan has {size}"
    return "has a Content-Encoding" if given.get("Content-Encoding", "identity") != "identity" else ""


def _open_hub(address: str, environment: Mapping[str, str]) -> HttpSource:
    """Open hf://owner/name@revision with HTTP ranges."""
    from huggingface_hub import get_token, hf_hub_url

    repository, _, revision = address.partition("://")[2].partition("@")
    endpoint, token = HF_ENDPOINT.read(environment) or None, HF_TOKEN.read(environment) or get_token()
    safe = parse_origin(endpoint or _HUB).may_hear_secrets
    return HttpSource(
        address,
        {"Authorization": f"Bearer {token}"} if token and safe else {},
        lambda name: hf_hub_url(repository, name, revision=revision or None, endpoint=endpoint),
    )


class ObjectSource:
    """Objects below s3://bucket/prefix; the client's AWS variables set endpoint, region and credentials."""

    def __init__(self, address: str, environment: Mapping[str, str]) -> None:
        try:
            from obstore.store import S3Store
        except ImportError as error:
            raise SourceUnusableError(f"{address} needs obstore: coldstart install s3") from error
        bucket, _, self._prefix = address.partition("://")[2].partition("/")
        config: Any = {key: value for key, value in environment.items() if key.startswith("AWS_")}
        endpoint = AWS_ENDPOINT_URL.read(config) or AWS_ENDPOINT.read(config)
        plain = endpoint.startswith("http://")
        # A signed request does not contain the key, but contains the session token.
        if plain and "AWS_SESSION_TOKEN" in config and not parse_origin(endpoint).may_hear_secrets:
            raise SourceUnusableError(
                f"cannot send AWS_SESSION_TOKEN to {parse_origin(endpoint)} without TLS"
            )
        # The daemon retries, so that a retry does not keep a stream from other requests.
        self._store = S3Store(
            bucket, config=config, client_options={"allow_http": plain}, retry_config={"max_retries": 0}
        )

    def read(self, name: str, size: int, start: int, buffer: memoryview, count: Count) -> int:
        """Implement RangeSource."""
        import obstore
        from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

        path = f"{self._prefix}/{name}".lstrip("/")
        try:
            data = memoryview(obstore.get_range(self._store, path, start=start, length=len(buffer)))
        except (FileNotFoundError, PermissionError, PermissionDeniedError, UnauthenticatedError) as error:
            raise SourceUnusableError(f"{path}: {str(error).splitlines()[0]}") from error
        except Exception as error:  # any other error of obstore: the network or the server
            raise SourceUnavailableError(f"{path}: {str(error).splitlines()[0]}") from error
        count(len(data))
        if len(data) != len(buffer):
            raise SourceUnusableError(f"{path} ends before byte {start + len(buffer)} of {size}")
        buffer[:] = data
        return len(data)

    def close(self) -> None:
        """Implement RangeSource; the store closes its connections itself."""
