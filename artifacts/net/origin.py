"""Origins (RFC 6454): scheme, host and port, and which of them may be given a secret.

A secret goes to the origin that it was stored for, and over plain HTTP only where no wire is: on the loopback
interface.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from typing import NamedTuple
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}
# The one large registry whose tokens come from a host that is no parent of its own.
_KNOWN_REALMS = {"registry-1.docker.io": frozenset({"auth.docker.io"})}


class Origin(NamedTuple):
    """Who answers an address."""

    scheme: str
    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether the host is this machine by name: no resolver is asked, which could say so of any name."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return False

    @property
    def may_hear_secrets(self) -> bool:
        """Whether what is sent there can be read by nobody on the way."""
        return self.scheme == "https" or (self.scheme == "http" and self.is_loopback)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        shown = host if self.port == _PORTS.get(self.scheme) else f"{host}:{self.port}"
        return f"{self.scheme}://{shown}"


def parse_origin(url: str) -> Origin:
    """The origin of an absolute http(s) address. Raises ValueError for any other."""
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ValueError(f"{parts.scheme or 'no scheme'} is not http or https with a host")
    return Origin(parts.scheme, parts.hostname.rstrip("."), parts.port or _PORTS[parts.scheme])


def gives_tokens_for(realm: Origin, registry: Origin, allowed: Collection[str] = ()) -> bool:
    """Whether `realm` may be told the credentials of `registry`, which names it in a challenge.

    Itself; a parent domain of two labels or more, whose owner rules the registry's name anyway; or one that the
    user allows. Other ports of a loopback host belong to other users.
    """
    if not realm.may_hear_secrets:
        return False
    if realm.host in allowed or str(realm) in allowed or realm.host in _KNOWN_REALMS.get(registry.host, ()):
        return True
    if realm.host == registry.host:
        return realm.port == registry.port or not realm.is_loopback
    return "." in realm.host and registry.host.endswith(f".{realm.host}") and not _is_address(registry.host)


def without_secrets(url: str) -> str:
    """The address as it may be shown: no user, no password, no query (a presigned one is a password), no fragment."""
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
