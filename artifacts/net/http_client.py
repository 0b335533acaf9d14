"""HTTP client based on urllib3, with rules for secrets, redirects, sizes and time limits.

A secret is sent only to its own origin. Responses are read in bounded chunks, at no less than the minimum rate of
HttpLimits.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any
from urllib.parse import urljoin
from urllib.request import getproxies, proxy_bypass

import urllib3
from coldstart.artifacts.errors import RemoteFailedError
from coldstart.artifacts.net.origin import Origin, parse_origin, redact_url
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError
from urllib3.util.ssl_ import create_urllib3_context

REDIRECTS = frozenset({301, 302, 303, 307, 308})
PATIENCE_VARIABLE = "COLDSTART_HTTP_PATIENCE_S"
_MAX_REDIRECTS = 5
_BLOCK = 1 << 17
_SLICE = 1 << 20


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Time limits of a request in seconds, and the minimum rate of a response body in bytes per second.

    `headers_s` limits the wait for status and headers. A body is too slow once the reader has waited longer than stall_s
    + n / min_bytes_per_s for its last n bytes. Chunk headers do not count as bytes, and the reader's own processing time
    does not count as waiting.
    """

    connect_s: float = 10.0
    headers_s: float = 30.0
    stall_s: float = 30.0
    min_bytes_per_s: float = 16 << 10


def read_limits() -> HttpLimits:
    """Return the default limits, with `headers_s` and `stall_s` set to COLDSTART_HTTP_PATIENCE_S if that variable is set."""
    with suppress(ValueError):
        if 0.0 < (patience_s := float(os.environ.get(PATIENCE_VARIABLE, ""))) < float("inf"):
            return HttpLimits(headers_s=patience_s, stall_s=patience_s)
    return HttpLimits()


class RemoteUnreachableError(RemoteFailedError):
    """Error for a missing, broken or slow response. A later request may succeed."""


class SlowServerError(RemoteUnreachableError):
    """Error for a server that responds too late or sends data below the minimum rate. An immediate retry does not help."""


class ForbiddenError(RemoteFailedError):
    """Error for a forbidden request: a secret without TLS, too many redirects, or a redirect from https to http."""


@dataclass(frozen=True, slots=True)
class Secret:
    """Headers with credentials, which are sent only to `origin`."""

    origin: Origin
    headers: Mapping[str, str] = field(repr=False)


class _DeadlineSocket:
    """Socket mixin whose reads time out at `deadline`, a value of `time.monotonic`, if it is set."""

    deadline: float | None = None

    def recv_into(self, buffer: Any, *rest: Any) -> int:
        if self.deadline is not None:
            if (left_s := self.deadline - monotonic()) <= 0:  # even if endless headers arrive fast
                raise TimeoutError
            self.settimeout(left_s)  # type: ignore[attr-defined]
        return super().recv_into(buffer, *rest)  # type: ignore[misc,no-any-return]


class _Socket(_DeadlineSocket, socket.socket):
    pass


class _TlsSocket(_DeadlineSocket, ssl.SSLSocket):
    pass


class _DeadlineConnection:
    """Connection mixin with one deadline for the status and all headers of a response."""

    sock: Any
    timeout: Any

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]
        if type(self.sock) is socket.socket:
            timeout = self.sock.gettimeout()
            self.sock = _Socket(fileno=self.sock.detach())
            self.sock.settimeout(timeout)

    def getresponse(self) -> Any:
        sock, self.sock.deadline = self.sock, monotonic() + self.timeout
        try:
            response = super().getresponse()  # type: ignore[misc]
        except TimeoutError as error:
            raise SlowServerError(f"the server did not respond within {self.timeout:.0f} s") from error
        response.timed = sock
        return response


class _Connection(_DeadlineConnection, HTTPConnection):
    pass


class _TlsConnection(_DeadlineConnection, HTTPSConnection):
    pass


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


def tls_context() -> ssl.SSLContext:
    """Return an SSL context that trusts SSL_CERT_FILE or SSL_CERT_DIR, else the system's certificates, else certifi's."""
    context = create_urllib3_context()
    context.sslsocket_class = _TlsSocket
    paths = ssl.get_default_verify_paths()
    if paths.cafile or paths.capath:
        context.load_default_certs()
    else:
        import certifi

        context.load_verify_locations(certifi.where())
    return context


class HttpResponse(AbstractContextManager["HttpResponse"]):
    """Response with a streamed body. The caller closes it."""

    def __init__(self, response: Any, url: str, redirected: bool, bounds: HttpLimits) -> None:
        self._response, self._bounds, self._patience_s = response, bounds, bounds.stall_s
        self.url, self.was_redirected = url, redirected
        self.status: int = response.status
        self.reason = str(response.reason or "")[:80]
        self.headers: Mapping[str, str] = response.headers

    def readinto(self, buffer: memoryview) -> int:
        """Read available bytes, at most 1 MiB, into `buffer`, and return the number of bytes read, or 0 at the end.

        Raises RemoteUnreachableError.
        """
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read(self, size: int = _SLICE) -> bytes:
        """Return available bytes, at most `size` and 1 MiB, or b"" at the end. Raises RemoteUnreachableError."""
        began = monotonic()
        self._response.timed.deadline = began + self._patience_s
        try:
            data: bytes = self._response.read1(min(size, _SLICE))
        except (HTTPError, http.client.HTTPException, OSError, ValueError) as error:
            self.close()
            if isinstance(_find_root_cause(error), TimeoutError):
                limits = self._bounds
                slow = f"the server sent less than {limits.min_bytes_per_s:.0f} bytes/s for {limits.stall_s:.0f} s"
                raise SlowServerError(slow) from error
            reason = f"the response of {redact_url(self.url)} broke off: {_describe_cause(error)}"
            raise RemoteUnreachableError(reason) from error
        waited_s = monotonic() - began
        self._patience_s += len(data) / self._bounds.min_bytes_per_s - waited_s
        self._patience_s = min(self._bounds.stall_s, self._patience_s)
        return data

    def read_up_to(self, cap: int) -> bytes:
        """Read at most the first `cap` bytes of the body, and close the response. Raises RemoteUnreachableError."""
        parts: list[bytes] = []
        with self:
            while cap > 0 and (part := self.read(cap)):
                parts.append(part)
                cap -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Return the connection to the pool if the body was read completely; otherwise close it."""
        if self._response.closed:
            self._response.release_conn()
        else:
            self._response.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class HttpClient:
    """HTTP client for one thread, with connection pools. Proxies come from the environment, except for loopback addresses."""

    def __init__(self, bounds: HttpLimits | None = None) -> None:
        self._bounds = bounds or read_limits()
        self._managers: dict[tuple[str, str | None], urllib3.PoolManager] = {}

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        secret: Secret | None = None,
        body: object = None,
        redirects: bool = True,
    ) -> HttpResponse:
        """Send a request and return the final response. GET and HEAD follow redirects if `redirects` is set.

        `secret` is sent only to its own origin. Raises RemoteUnreachableError, ForbiddenError.
        """
        follow, first = redirects and method in ("GET", "HEAD"), url
        for _ in range(_MAX_REDIRECTS):
            response = self._send_once(method, url, headers or {}, secret, body)
            answer = HttpResponse(response, url, url != first, self._bounds)
            location = answer.headers.get("Location")
            if not follow or answer.status not in REDIRECTS or not location:
                return answer
            answer.close()
            url = resolve_redirect(url, location)
        raise ForbiddenError(f"{redact_url(first)} redirects too many times")

    def close(self) -> None:
        """Close all connections."""
        while self._managers:
            self._managers.popitem()[1].clear()

    def _send_once(
        self, method: str, url: str, headers: Mapping[str, str], secret: Secret | None, body: object
    ) -> Any:
        timeout = urllib3.Timeout(connect=self._bounds.connect_s, read=self._bounds.headers_s)
        options: dict[str, Any] = {"body": body, "timeout": timeout, "redirect": False, "retries": False}
        options |= {"preload_content": False, "decode_content": False}
        try:
            options["headers"] = {
                "Accept-Encoding": "identity",
                **headers,
                **_select_secret_headers(secret, url),
            }
            manager = self._choose_manager(parse_origin(url))
            try:
                return manager.urlopen(method, url, **options)
            except urllib3.exceptions.ProtocolError as error:
                # A server may have closed a pooled connection; a request without a body is safe to repeat.
                if body is not None or not isinstance(error.args[-1], http.client.RemoteDisconnected):
                    raise
                return manager.urlopen(method, url, **options)
        except (HTTPError, http.client.HTTPException, OSError, ValueError) as error:
            raise RemoteUnreachableError(_describe_cause(error)) from error

    def _choose_manager(self, origin: Origin) -> urllib3.PoolManager:
        """Return the connection pools for the scheme of `origin` and for its proxy."""
        proxy = find_proxy(origin)
        if (manager := self._managers.get((origin.scheme, proxy))) is not None:
            return manager
        options: dict[str, Any] = {"maxsize": 2, "blocksize": _BLOCK}
        if origin.scheme == "https" or (proxy or "").startswith("https:"):
            options["ssl_context"] = tls_context()
        if proxy is None:
            manager = urllib3.PoolManager(**options)
        else:
            login = urllib3.util.parse_url(proxy).auth
            proxy_headers = urllib3.make_headers(proxy_basic_auth=login) if login else None
            manager = urllib3.ProxyManager(proxy, proxy_headers=proxy_headers, **options)
        manager.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
        self._managers[origin.scheme, proxy] = manager
        return manager


def resolve_redirect(url: str, location: str) -> str:
    """Return the absolute URL that the `location` header of a response from `url` refers to.

    Raises ForbiddenError for a scheme other than http(s), and for a redirect from https to http.
    """
    try:
        target = urljoin(url, location)
        before, after = parse_origin(url), parse_origin(target)
    except ValueError as error:
        raise ForbiddenError(f"{redact_url(url)} redirects to an invalid URL: {error}") from error
    if before.scheme == "https" and after.scheme != "https":
        raise ForbiddenError(f"{redact_url(url)} redirects from https to http")
    return target


def _find_root_cause(error: BaseException) -> BaseException:
    """Return the innermost cause, because the text of a urllib3 error may contain the URL and thus a secret."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _describe_cause(error: BaseException) -> str:
    cause = _find_root_cause(error)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {cause.verify_message}"
    text = getattr(cause, "strerror", None) or type(cause).__name__
    return "timed out" if isinstance(cause, TimeoutError) else str(text)


def _select_secret_headers(secret: Secret | None, url: str) -> Mapping[str, str]:
    if secret is None or parse_origin(url) != secret.origin:
        return {}
    if not secret.origin.can_receive_secrets:
        raise ForbiddenError(f"refusing to send a password or token to {secret.origin} without TLS")
    return secret.headers


def find_proxy(origin: Origin) -> str | None:
    """Return the proxy URL that the environment sets for `origin`, or None. Loopback addresses use no proxy."""
    if origin.is_loopback or proxy_bypass(origin.host):
        return None
    proxies = getproxies()
    return proxies.get(origin.scheme) or proxies.get("all")
