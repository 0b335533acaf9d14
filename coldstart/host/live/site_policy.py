"""Checks that keep web pages of other sites from a gateway: names, origins and content types of requests.

A page of another site can make a browser send requests to a gateway. It cannot choose the Host and Origin headers,
and without the gateway's consent (CORS) it can send neither JSON nor a header that carries a key.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from ipaddress import ip_address

from starlette.middleware.cors import CORSMiddleware

from coldstart.host.endpoint import GatewayEndpoint
from coldstart.host.live.answers import Receive, Scope, Send

KEY_HEADERS = (b"authorization", b"x-api-key", b"x-coldstart-admin-key")
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
JSON = b"application/json"

Application = Callable[[Scope, Receive, Send], Awaitable[None]]


def allow_origins(app: Application, origins: Sequence[str]) -> Application:
    """Return `app` with answers that let pages of these origins read them (CORS)."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=[origin.lower() for origin in origins],
        allow_methods=["GET", "POST"],
        allow_headers=[
            "Authorization",
            "Content-Type",
            "X-Api-Key",
            "X-Coldstart-Keep-Alive",
            "X-Request-Id",
        ],
        expose_headers=["Server-Timing", "X-Coldstart-Mode", "X-Request-Id"],
    )


class SitePolicy:
    """Hosts and origins that one gateway accepts."""

    def __init__(self, endpoint: GatewayEndpoint) -> None:
        self._names = {"localhost", endpoint.host.lower(), *(name.lower() for name in endpoint.allow_hosts)}
        self._origins = {origin.lower().encode() for origin in endpoint.allow_origins}

    def find_violation(self, scope: Scope, headers: Mapping[bytes, bytes]) -> tuple[int, str] | None:
        """Return status and reason of the rejection of a request; None for a request that passes."""
        host = headers.get(b"host")
        if host is not None and not self._accepts_host(host):
            return 421, f"the host {_show(host)} is not a name of this gateway (--allow-host)"
        origin = headers.get(b"origin")
        if origin is not None and origin not in self._origins and origin.partition(b"://")[2] != host:
            return 403, f"web pages of {_show(origin)} may not use this gateway (--allow-origin)"
        if scope["method"] not in SAFE_METHODS and not _proves_consent(headers):
            return 415, "the request needs the header Content-Type: application/json"
        return None

    def _accepts_host(self, host: bytes) -> bool:
        """Return whether a Host header names this gateway.

        An IP address is accepted: a foreign page can rebind only a name to the gateway's address.
        """
        name = _strip_port(host.decode("latin-1").lower())
        return name in self._names or "*" in self._names or _is_address(name)


def _show(value: bytes) -> str:
    return repr(value[:200].decode("ascii", errors="replace"))


def _strip_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _proves_consent(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a request has a content type or a header that a foreign page cannot send."""
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    return kind == JSON or any(name in headers for name in KEY_HEADERS)
