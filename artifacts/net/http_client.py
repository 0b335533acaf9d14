"""HTTP client of the project: urllib3's connections and proxies, with rules for secrets, redirects, sizes and time.

A secret is sent only to its own origin. A response is read in bounded parts, and no slower than `Bounds` allow.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
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
class Bounds:
    """Limits in seconds of the connection, of status and headers, and of patience; the floor in bytes per second.

    A body is too slow if its reader has waited for more than window_s + n / floor seconds for its last n bytes. Headers of
    chunks do not count, nor does time that the reader uses itself.
    """

    connect_s: float = 10.0
    head_s: float = 30.0
    window_s: float = 30.0
    floor: float = 16 << 10


def read_bounds(environment: Mapping[str, str] = os.environ) -> Bounds:
    """Return the bounds with the patience (s, of head and window) of the environment."""
    with suppress(ValueError):
        if 0.0 < (patience_s := float(environment.get(PATIENCE_VARIABLE, ""))) < float("inf"):
            return Bounds(head_s=patience_s, window_s=patience_s)
    return Bounds()


class RemoteUnreachableError(RemoteFailedError):
    """The response is missing, broken or too slow; a later request may succeed."""


class SlowServerError(RemoteUnreachableError):
    """The response is slower than the floor; repeating the request at once does not help."""


class ForbiddenError(RemoteFailedError):
    """The response requires something that is never done: a secret without TLS, endless redirects, a redirect off TLS."""


@dataclass(frozen=True, slots=True)
class Secret:
    """Headers with credentials, which are sent to `origin` only."""

    origin: Origin
    headers: Mapping[str, str] = field(repr=False)


class _Timed:
    """Socket whose reads end at `deadline`, on the clock of `monotonic`, if one is set."""

    deadline: float | None = None

    def recv_into(self, buffer: Any, *rest: Any) -> int:
        if self.deadline is not None:
            if (left_s := self.deadline - monotonic()) <= 0:  # also where endless headers arrive fast
                raise TimeoutError
            self.settimeout(left_s)  # type: ignore[attr-defined]
        return super().recv_into(buffer, *rest)  # type: ignore[misc,no-any-return]


class _Socket(_Timed, socket.socket):
    pass


class _TlsSocket(_Timed, ssl.SSLSocket):
    pass


class _Exchange:
    """Connection mixin with timed sockets: status and headers of a response have one deadline."""

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
            raise SlowServerError(f"no response within {self.timeout:.0f} s") from error
        response.timed = sock
        return response


class _Connection(_Exchange, HTTPConnection):
    pass


class _TlsConnection(_Exchange, HTTPSConnection):
    pass


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


def tls_context() -> ssl.SSLContext:
    """Return a context that trusts SSL_CERT_FILE or SSL_CERT_DIR, else the system's certificates, else certifi's."""
    context = create_urllib3_context()
    context.sslsocket_class = _TlsSocket
    paths = ssl.get_default_verify_paths()
    if paths.cafile or paths.capath:
        context.load_default_certs()
    else:
        import certifi

        context.load_verify_locations(certifi.where())
    return context


class Answer:
    """Response with a streamed body; the caller closes it."""

    def __init__(self, response: Any, url: str, redirected: bool, bounds: Bounds) -> None:
        self._response, self._bounds, self._patience_s = response, bounds, bounds.window_s
        self.url, self.redirected = url, redirected
        self.status: int = response.status
        self.reason = str(response.reason or "")[:80]
        self.headers: Mapping[str, str] = response.headers

    def readinto(self, buffer: memoryview) -> int:
        """Read what has arrived, up to a MiB, into `buffer`; 0 at the end. Raises RemoteUnreachableError."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read(self, size: int = _SLICE) -> bytes:
        """Return what has arrived, up to `size` bytes and a MiB; b"" at the end. Raises RemoteUnreachableError."""
        began = monotonic()
        self._response.timed.deadline = began + self._patience_s
        try:
            data: bytes = self._response.read1(min(size, _SLICE))
        except (HTTPError, http.client.HTTPException, OSError, ValueError) as error:
            self.close()
            if isinstance(_root(error), TimeoutError):
                limits = self._bounds
                slow = f"less than {limits.floor:.0f} bytes/s for {limits.window_s:.0f} s"
                raise SlowServerError(slow) from error
            raise RemoteUnreachableError(_reason(error)) from error
        waited_s = monotonic() - began
        self._patience_s += len(data) / self._bounds.floor - waited_s
        self._patience_s = min(self._bounds.window_s, self._patience_s)
        return data

    def read_up_to(self, cap: int) -> bytes:
        """Read the body, or its first `cap` bytes, and close the response. Raises RemoteUnreachableError."""
        parts: list[bytes] = []
        with self:
            while cap > 0 and (part := self.read(cap)):
                parts.append(part)
                cap -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Return the connection to the pool if the body was read to its end, else drop it."""
        if self._response.closed:
            self._response.release_conn()
        else:
            self._response.close()

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HttpClient:
    """HTTP client for one thread, with connection pools. Proxies come from the environment, except for loopback."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        self._bounds = bounds or read_bounds()
        self._managers: dict[tuple[str, str | None], urllib3.PoolManager] = {}

    def ask(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        secret: Secret | None = None,
        body: object = None,
        redirects: bool = True,
    ) -> Answer:
        """Send one request and return the last response; a GET or HEAD follows redirects.

        Raises RemoteUnreachableError, ForbiddenError.
        """
        follow, first = redirects and method in ("GET", "HEAD"), url
        for _ in range(_MAX_REDIRECTS):
            response = self._once(method, url, headers or {}, secret, body)
            answer = Answer(response, url, url != first, self._bounds)
            location = answer.headers.get("Location")
            if not follow or answer.status not in REDIRECTS or not location:
                return answer
            answer.close()
            url = redirected(url, location)
        raise ForbiddenError(f"{redact_url(first)} redirects too many times")

    def close(self) -> None:
        """Close all connections."""
        while self._managers:
            self._managers.popitem()[1].clear()

    def _once(
        self, method: str, url: str, headers: Mapping[str, str], secret: Secret | None, body: object
    ) -> Any:
        timeout = urllib3.Timeout(connect=self._bounds.connect_s, read=self._bounds.head_s)
        given: dict[str, Any] = {"body": body, "timeout": timeout, "redirect": False, "retries": False}
        given |= {"preload_content": False, "decode_content": False}
        try:
            given["headers"] = {"Accept-Encoding": "identity", **headers, **_own(secret, url)}
            manager = self._choose_manager(parse_origin(url))
            try:
                return manager.urlopen(method, url, **given)
            except urllib3.exceptions.ProtocolError as error:
                # A server may have closed a pooled connection; a request without a body is safe to repeat.
                if body is not None or not isinstance(error.args[-1], http.client.RemoteDisconnected):
                    raise
                return manager.urlopen(method, url, **given)
        except (HTTPError, http.client.HTTPException, OSError, ValueError) as error:
            raise RemoteUnreachableError(_reason(error)) from error

    def _choose_manager(self, origin: Origin) -> urllib3.PoolManager:
        """Return the connection pools of a scheme and a proxy."""
        proxy = find_proxy(origin)
        if (manager := self._managers.get((origin.scheme, proxy))) is not None:
            return manager
        given: dict[str, Any] = {"maxsize": 2, "blocksize": _BLOCK}
        if origin.scheme == "https" or (proxy or "").startswith("https:"):
            given["ssl_context"] = tls_context()
        if proxy is None:
            manager = urllib3.PoolManager(**given)
        else:
            login = urllib3.util.parse_url(proxy).auth
            named = urllib3.make_headers(proxy_basic_auth=login) if login else None
            manager = urllib3.ProxyManager(proxy, proxy_headers=named, **given)
        manager.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
        self._managers[origin.scheme, proxy] = manager
        return manager


def redirected(url: str, location: str) -> str:
    """Return the address that a response from `url` redirects to.

    Raises ForbiddenError for another scheme than http(s), and for a redirect from https to http.
    """
    try:
        target = urljoin(url, location)
        before, after = parse_origin(url), parse_origin(target)
    except ValueError as error:
        raise ForbiddenError(f"{redact_url(url)} redirects to an invalid address: {error}") from error
    if before.scheme == "https" and after.scheme != "https":
        raise ForbiddenError(f"{redact_url(url)} redirects to an address without TLS")
    return target


def _root(error: BaseException) -> BaseException:
    """Return the cause of an error of urllib3, whose own text may contain the address and thus a secret."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _reason(error: BaseException) -> str:
    cause = _root(error)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {cause.verify_message}"
    text = getattr(cause, "strerror", None) or type(cause).__name__
    return "timed out" if isinstance(cause, TimeoutError) else str(text)


def _own(secret: Secret | None, url: str) -> Mapping[str, str]:
    if secret is None or parse_origin(url) != secret.origin:
        return {}
    if not secret.origin.may_hear_secrets:
        raise ForbiddenError(f"{secret.origin} would receive a password or token without TLS")
    return secret.headers


def find_proxy(origin: Origin) -> str | None:
    """Return the address of the proxy that the environment names for `origin`; none is used for this machine."""
    if origin.is_loopback or proxy_bypass(origin.host):
        return None
    proxies = getproxies()
    return proxies.get(origin.scheme) or proxies.get("all")
