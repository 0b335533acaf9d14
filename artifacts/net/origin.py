"""Origins of URLs (RFC 6454), and the rules by which an origin may receive secrets.

A secret is sent only to the origin that it was stored for, and over plain HTTP only to a loopback address.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from typing import NamedTuple
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}
# Docker Hub's token server is not on a parent domain of its registry.
_KNOWN_REALMS = {"registry-1.docker.io": frozenset({"auth.docker.io"})}


class Origin(NamedTuple):
    """Origin of a URL: scheme, host and port."""

    scheme: str
    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Return whether the host is localhost or a loopback address. DNS is not used: it could map any name to loopback."""
        address = _parse_address(self.host)
        return self.host == "localhost" or (address is not None and address.is_loopback)

    @property
    def can_receive_secrets(self) -> bool:
        """Return whether secrets may be sent to this origin: it uses TLS, or it is this machine."""
        return self.scheme == "https" or (self.scheme == "http" and self.is_loopback)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        shown = host if self.port == _PORTS.get(self.scheme) else f"{host}:{self.port}"
        return f"{self.scheme}://{shown}"


def parse_origin(url: str) -> Origin:
    """Return the origin of an absolute http(s) URL. Raises ValueError for any other URL."""
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname:
        found = f"scheme {parts.scheme!r} and host {parts.hostname or ''!r}"
        raise ValueError(f"expected an http or https URL with a host, found {found}")
    return Origin(parts.scheme, parts.hostname.rstrip("."), parts.port or _PORTS[parts.scheme])


def may_receive_credentials(realm: Origin, registry: Origin, allowed: Collection[str] = ()) -> bool:
    """Return whether credentials for `registry` may be sent to `realm`, the token server that its challenge names.

    They may be sent to the registry itself, to a parent domain with at least two labels (its owner controls the
    registry's name anyway), and to hosts in `allowed`. On a loopback host, other ports may belong to other users.
    """
    if not realm.can_receive_secrets:
        return False
    if realm.host in allowed or str(realm) in allowed or realm.host in _KNOWN_REALMS.get(registry.host, ()):
        return True
    if realm.host == registry.host:
        return realm.port == registry.port or not realm.is_loopback
    return (
        "." in realm.host and registry.host.endswith(f".{realm.host}") and not _parse_address(registry.host)
    )


def redact_url(url: str) -> str:
    """Return `url` without user, password, fragment and query, because the query of a presigned URL grants access."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url
    path = rest.partition("?")[0].partition("#")[0]
    authority, slash, path = path.partition("/")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"


def _parse_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
