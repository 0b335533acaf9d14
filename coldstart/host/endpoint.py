"""Address of a gateway and who may use it: key, host names, origins, TLS and limits. The same for host and fleet."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from coldstart.errors import UsageError
from coldstart.host.client_keys import ClientKeys
from coldstart.host.limits import GatewayLimits

_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:\d+)?")
_NAME = re.compile(r"\*|[a-z0-9.-]+")


@dataclass(frozen=True)
class GatewayEndpoint:
    """Address, key and checks of one gateway.

    `allow_hosts` are names by which clients may address the gateway, beside its address and loopback names; "*" allows
    any name. `client_keys` are keys of single clients, beside `api_key`, which may do everything. `allow_origins` are
    origins of web pages that may use it. `insecure` allows other machines without a key.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    client_keys: ClientKeys | None = None
    insecure: bool = False
    allow_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    limits: GatewayLimits = field(default_factory=GatewayLimits)

    @property
    def requires_key(self) -> bool:
        """Return whether a client needs a key."""
        return self.api_key is not None or self.client_keys is not None

    def is_without_operator(self) -> bool:
        """Return whether keys are required, but none of them opens the status and the control of a host."""
        return self.api_key is None and self.client_keys is not None and not self.client_keys.has_admin()

    def check(self) -> None:
        """Raise UsageError for values that no gateway can use, or that open it to everyone by accident."""
        if not 0 <= self.port <= 65535:  # getaddrinfo uses the lower 16 bits
            raise UsageError(
                f"cannot listen at {self.host}:{self.port}: the port is above 65535", hint="--port NUMBER"
            )
        for name in self.allow_hosts:
            if not _NAME.fullmatch(name.lower()):
                raise UsageError(
                    f"invalid --allow-host: {name!r} is not a host name", hint="write the name without a port"
                )
        for origin in self.allow_origins:
            if not _ORIGIN.fullmatch(origin.lower()):
                raise UsageError(
                    f"invalid --allow-origin: {origin!r} is not an origin",
                    hint="write scheme, name and port: https://chat.example.com:8443",
                )
        if self.api_key is not None and not self.api_key.strip():
            raise UsageError("the API key is empty", hint="--api-key-file FILE")
        if self.api_key and self.client_keys and (client := self.client_keys.find(self.api_key.encode())):
            raise UsageError(
                f"the API key is also the key of {client.name}", hint=f"write another key for {client.name}"
            )
        if self.api_key is None and self.client_keys is not None and not self.client_keys.clients:
            raise UsageError(
                f"client key file {self.client_keys.file}: names no client",
                hint='write [NAME] and key_file = "FILE" below it, or --api-key-file FILE',
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("TLS needs a certificate and its key.", hint="--tls-cert FILE --tls-key FILE")
        if not self.requires_key and not self.insecure and not is_loopback(self.host):
            raise UsageError(
                f"cannot listen at {self.host} without an API key: other machines could use every model",
                hint="--api-key-file FILE, or --insecure to allow it",
            )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address or name to listen at."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
