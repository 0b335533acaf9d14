"""Origins (RFC 6454): scheme, host and port, and whether a secret may be sent there.

A secret is sent only to the origin that it was stored for, and over plain HTTP only on the loopback interface.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from typing import NamedTuple
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}
# The one large registry whose token server is not on a parent domain.
_KNOWN_REALMS = {"registry-1.docker.io": frozenset({"auth.docker.io"})}


class Origin(NamedTuple):
    """Origin of an address."""

    scheme: str
    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Return whether the host is this machine by name. No resolver is used: it could map any name to loopback."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return False

    @property
    def may_hear_secrets(self) -> bool:
        """Return whether no other machine can read a request to this origin."""
        return self.scheme == "https" or (self.scheme == "http" and self.is_loopback)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        shown = host if self.port == _PORTS.get(self.scheme) else f"{host}:{self.port}"
        return f"{self.scheme}://{shown}"


def parse_origin(url: str) -> Origin:
    """Return the origin of an absolute http(s) address. Raises ValueError for any other."""
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ValueError(f"{parts.scheme or 'no scheme'} is not http or https with a host")
    return Origin(parts.scheme, parts.hostname.rstrip("."), parts.port or _PORTS[parts.scheme])


def gives_tokens_for(realm: Origin, registry: Origin, allowed: Collection[str] = ()) -> bool:
    """Return whether the credentials of `registry` may be sent to `realm`, which it names in a challenge.

    True for the registry itself, for a parent domain of two or more labels (its owner controls the registry's name
    anyway), and for a host that the user allows. Other ports of a loopback host belong to other users.
    """
    if not realm.may_hear_secrets:
        return False
    if realm.host in allowed or str(realm) in allowed or realm.host in _KNOWN_REALMS.get(registry.host, ()):
        return True
    if realm.host == registry.host:
        return realm.port == registry.port or not realm.is_loopback
    return "." in realm.host and registry.host.endswith(f".{realm.host}") and not _is_address(registry.host)


def redact_url(url: str) -> str:
    """Return the address without user, password, query (a presigned one is a password) and fragment."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url
    path = rest.partition("?")[0].partition("#")[0]
    authority, slash, path = path.partition("/")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
