"""Address and access control of a gateway, for hosts and fleets: API keys, host names, origins, TLS and limits.

A client key file has one table for each client. A file without tables is valid, and revokes all keys. Example:

[laptop]                        # name of the client in metrics and errors; its key appears in neither
key_file = "/run/keys/laptop"   # absolute, or relative to this file
models = ["tiny-llama"]         # optional: models that the client may use; default: all models
admin = false                   # true: the client may also read status, metrics and logs, and control the host

Invariant: keys never appear in error messages or in `repr`, and are compared in constant time. The command line
generates an option and an environment variable from each field of `GatewayEndpoint` and `GatewayLimits`.
"""

# ruff: noqa: RUF009 - `setting` returns a dataclass field
from __future__ import annotations

import hmac
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from coldstart.artifacts.net.origin import Origin
from coldstart.errors import UsageError
from coldstart.host.tables import check_ranges, decode, prefix_errors, read_toml
from coldstart.scheduling.declaration import setting
from coldstart.system.file_state import FileState, find_state
from coldstart.system.secrets import describe_exposure, read_key

if TYPE_CHECKING:
    from coldstart.host.launches import Catalogue


@dataclass(frozen=True, slots=True)
class ClientKey:
    """API key of one client, and its permissions."""

    name: str
    key_file: str
    key: bytes = field(repr=False, compare=False)
    models: tuple[str, ...] | None = None
    admin: bool = False

    def may_use(self, asked: str | None, catalogue: Catalogue) -> bool:
        """Return whether the client may use the model that the name `asked` refers to."""
        if self.models is None:
            return True
        route = catalogue.find_destination(asked)
        allowed = (catalogue.find_destination(name) for name in self.models)
        return route is not None and route.model in {one.model for one in allowed if one is not None}


class ClientKeys:
    """API keys of clients, read from one TOML file. Raises UsageError if the file or one of its key files is invalid."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._states: dict[Path, FileState | None] = {}
        self.clients: tuple[ClientKey, ...] = ()
        self.reload()

    def find(self, key: bytes) -> ClientKey | None:
        """Return the client whose API key is `key`, or None if the key is unknown."""
        # Compare with every key, so that the response time does not reveal partial matches.
        found = [client for client in self.clients if hmac.compare_digest(client.key, key)]
        return found[0] if found else None

    def describe_unknown_models(self, catalogue: Catalogue) -> Iterator[str]:
        """Yield a warning for each model that a client is permitted to use but that does not exist."""
        for client in self.clients:
            for name in client.models or ():
                if catalogue.find_destination(name) is None:
                    yield f"client {client.name} is allowed to use model {name}, which does not exist"

    def describe_exposed_files(self) -> Iterator[str]:
        """Yield a warning for each key file that other users can read."""
        notes = (describe_exposure(self.file.parent / client.key_file) for client in self.clients)
        yield from filter(None, notes)

    def have_changed(self) -> bool:
        """Return whether the file or one of its key files has changed since it was read."""
        return any(find_state(path) != state for path, state in self._states.items())

    def reload(self) -> None:
        """Reload the client keys. If that fails, the previous keys remain in effect.

        Raises:
            UsageError: A file cannot be read, an entry is unknown, or two clients have the same key.
        """
        # Record the state of each file before reading it, even if reading fails, so that later changes are detected.
        self._states = {self.file: find_state(self.file)}
        tables, clients = read_toml(self.file, "client key"), dict[bytes, ClientKey]()
        with prefix_errors(f"client key file {self.file}"):
            for name, table in tables.items():
                client = decode(ClientKey, table, name, name=name, key=b"")
                path = self.file.parent / client.key_file
                self._states[path] = find_state(path)
                client = replace(client, key=read_key(path).encode())
                if (other := clients.setdefault(client.key, client)) is not client:
                    raise UsageError(
                        f"clients {other.name} and {name} have the same key",
                        hint="generate a new key with `openssl rand -hex 32`",
                    )
        self.clients = tuple(clients.values())


KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Limits on each client connection and on all connections together. Sizes are in bytes, and times are in seconds.

    The request line and headers must not exceed `head_bytes` and must arrive within `head_s`, and the body within
    `body_s`. All buffered bodies together must not exceed `buffered_bytes`. A client that stops reading is disconnected
    after `write_s`.
    """

    head_bytes: int = 32 * KIB
    head_s: float = 10.0
    body_s: float = 120.0
    write_s: float = 30.0
    buffered_bytes: int = 256 * MIB
    body_bytes: int = setting(
        64 * MIB, "Maximum size of a request body, in bytes.", "--max-body-bytes", "BYTES", minimum=1 * KIB
    )
    idle_s: float = setting(
        60.0,
        "Close a connection after this many seconds without a request.",
        "--keep-alive-timeout",
        "SECONDS",
        exclusive_minimum=0,
    )
    connections: int = setting(
        8192,
        "Maximum number of client connections; the limit on open files can reduce it.",
        "--max-connections",
        "N",
        minimum=1,
    )

    def __post_init__(self) -> None:
        """Raise UsageError if a value is outside its range."""
        check_ranges(self)


_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:\d+)?")
_NAME = re.compile(r"\*|[a-z0-9.-]+")


@dataclass(frozen=True)
class GatewayEndpoint:
    """Address, API keys and access control of one gateway.

    `allow_hosts` are additional host names by which clients may address the gateway. "*" allows any name. `api_key` grants
    full access, and `client_keys` are the keys of individual clients. `allow_origins` are the origins of web pages that may
    use the gateway. `insecure` allows other machines to connect without a key.
    """

    host: str = setting("127.0.0.1", "Address to listen on.", "--host", "ADDRESS")
    port: int = setting(
        8000, "Port to listen on; 0 selects a free port.", "--port", "N", minimum=0, maximum=65535
    )
    api_key: str | None = setting(
        None, "API key that grants full access; default: no key is required.", "--api-key", "KEY"
    )
    client_keys: ClientKeys | None = setting(
        None,
        "TOML file with the API key and the permitted models of each client; the gateway reloads it when it changes;"
        " default: none.",
        "--client-keys",
        "FILE",
    )
    insecure: bool = setting(False, "Allow other machines to connect without an API key.", "--insecure")
    allow_hosts: tuple[str, ...] = setting(
        (),
        "Additional host name by which clients without a key may address the gateway; * allows any name. Repeatable.",
        "--allow-host",
        "NAME",
    )
    allow_origins: tuple[str, ...] = setting(
        (),
        "Origin of a web page that may use the gateway, such as https://chat.example.com. Repeatable.",
        "--allow-origin",
        "ORIGIN",
    )
    tls_cert: Path | None = setting(
        None, "PEM file with the certificate chain for HTTPS; default: serve HTTP.", "--tls-cert", "FILE"
    )
    tls_key: Path | None = setting(
        None,
        "PEM file with the private key of the --tls-cert certificate; default: serve HTTP.",
        "--tls-key",
        "FILE",
    )
    limits: GatewayLimits = field(default_factory=GatewayLimits)

    @property
    def requires_key(self) -> bool:
        """Return whether clients must send an API key."""
        return self.api_key is not None or self.client_keys is not None

    def has_no_admin_key(self) -> bool:
        """Return whether a key is required but no key grants admin access."""
        if self.api_key is not None or self.client_keys is None:
            return False
        return not any(client.admin for client in self.client_keys.clients)

    def check(self) -> None:
        """Raise UsageError if a value is invalid, or would expose the gateway unintentionally."""
        check_ranges(self)
        for name in self.allow_hosts:
            if not _NAME.fullmatch(name.lower()):
                raise UsageError(
                    f"invalid --allow-host: {name!r} is not a host name",
                    hint="use a host name without a port",
                )
        for origin in self.allow_origins:
            if not _ORIGIN.fullmatch(origin.lower()):
                raise UsageError(
                    f"invalid --allow-origin: {origin!r} is not an origin",
                    hint="include the scheme and the host name, such as https://chat.example.com:8443",
                )
        if self.api_key is not None and not self.api_key.strip():
            raise UsageError(
                "the API key is empty", hint="write a key to a file and pass --api-key-file FILE"
            )
        if self.api_key and self.client_keys and (client := self.client_keys.find(self.api_key.encode())):
            raise UsageError(
                f"the API key is also the key of client {client.name}",
                hint=f"use a different key for {client.name}",
            )
        if self.api_key is None and self.client_keys is not None and not self.client_keys.clients:
            raise UsageError(
                f"client key file {self.client_keys.file} contains no client",
                hint='add a table [NAME] with key_file = "FILE", or use --api-key-file FILE',
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError(
                "TLS requires both a certificate and its key",
                hint="pass both --tls-cert FILE and --tls-key FILE",
            )
        is_local = Origin("http", self.host.lower(), self.port).is_loopback
        if not (self.requires_key or self.insecure or is_local):
            raise UsageError(
                f"cannot listen at {self.host} without an API key: other machines could use all models",
                hint="pass --api-key-file FILE, or --insecure to allow access without a key",
            )
