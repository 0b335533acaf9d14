"""Where a server that listens at an address can be asked."""

from __future__ import annotations

_ALL = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def reachable(host: str) -> str:
    """The address to connect to on this machine: loopback for a server that listens at every address."""
    return _ALL.get(host, host)


def url(host: str, port: object, scheme: str = "http") -> str:
    """The same as a URL without a path."""
    name = reachable(host)
    return f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"
