"""Named API keys of a gateway's clients: the models that each client may use, and how often it may ask.

[laptop]                        # name of the client in metrics and errors; its key appears in neither
key_file = "/run/keys/laptop"   # absolute, or relative to this file
models = ["tiny-llama"]         # optional: names of models; default: all models
requests_per_minute = 60        # optional; default: no limit
admin = false                   # true: the client may also read status, metrics and logs, and control the host

Invariant: no key is part of an error, a representation or a comparison whose time depends on its content.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from coldstart.errors import UsageError
from coldstart.host.tables import decode, expect_table, read_toml
from coldstart.system.file_state import FileState, read_state
from coldstart.system.regular_file import read_key

if TYPE_CHECKING:
    from coldstart.host.launches import Catalogue


@dataclass(frozen=True, slots=True)
class ClientKey:
    """One client: its key and its rights."""

    name: str
    key_file: str
    key: bytes = field(repr=False)
    models: tuple[str, ...] | None = None
    requests_per_minute: int | None = None
    admin: bool = False

    def may_use(self, asked: str | None, catalogue: Catalogue) -> bool:
        """Return whether the client may use the model that a request for the name `asked` reaches."""
        if self.models is None:
            return True
        route = catalogue.route(asked)
        allowed = (catalogue.route(name) for name in self.models)
        return route is not None and route.model in {one.model for one in allowed if one is not None}


@dataclass(slots=True)
class _Bucket:
    """Requests that a client may send now; it refills evenly to the number of a minute."""

    left: float
    at: float

    def take(self, per_minute: int, now: float) -> float:
        """Take one request; return 0, or the seconds until one is available."""
        self.left = min(float(per_minute), self.left + (now - self.at) * per_minute / 60)
        self.at = now
        if self.left < 1:
            return (1 - self.left) * 60 / per_minute
        self.left -= 1
        return 0.0


class ClientKeys:
    """The clients of one file. The file and its key files are read again when they change.

    Raises:
        UsageError: the file or a key file cannot be used.
    """

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.file, self._clock = file, clock
        self._watch()
        self._clients: tuple[ClientKey, ...] = read_clients(file)
        self._buckets: dict[str, _Bucket] = {}

    def find(self, key: bytes) -> ClientKey | None:
        """Return the client with this key, or None."""
        # Compare with every key, so that the time does not show which one begins alike.
        found = [client for client in self._clients if hmac.compare_digest(client.key, key)]
        return found[0] if found else None

    def admit(self, client: ClientKey) -> float:
        """Count one request of a client; return 0, or the seconds until it may send the next."""
        limit, now = client.requests_per_minute, self._clock()
        if limit is None:
            return 0.0
        return self._buckets.setdefault(client.name, _Bucket(limit, now)).take(limit, now)

    def refresh(self) -> None:
        """Read the files again if they have changed. After an error the former clients remain.

        Raises:
            UsageError: the changed files cannot be used; once for each change.
        """
        if [_find_state(path) for path in self._paths] != self._states:
            self._watch()
            self._clients = read_clients(self.file)

    def _watch(self) -> None:
        """Record the states of the file and of the key files that it names, before they are read."""
        self._paths = [self.file, *_list_key_files(self.file)]
        self._states = [_find_state(path) for path in self._paths]


def read_clients(file: Path) -> tuple[ClientKey, ...]:
    """Return the clients of a file.

    Raises:
        UsageError: the file or a key file cannot be read, a key is unknown, or two clients have the same key.
    """
    names: dict[bytes, str] = {}
    clients = []
    for name, given in read_toml(file, "client key").items():
        try:
            table = expect_table(given, name)
            path = table.get("key_file")
            key = read_key(_locate(file, path)).encode() if isinstance(path, str) else b""
            client = decode(ClientKey, table, name, name=name, key=key)
        except UsageError as error:
            raise UsageError(f"client key file {file}: {error.message}", hint=error.hint) from error
        if (other := names.setdefault(key, name)) != name:
            raise UsageError(
                f"client key file {file}: {other} and {name} have the same key",
                hint="write another key: openssl rand -hex 32",
            )
        if client.requests_per_minute is not None and client.requests_per_minute < 1:
            raise UsageError(
                f"client key file {file}: {name}.requests_per_minute: expected 1 or more, found"
                f" {client.requests_per_minute}",
                hint="remove the client to refuse all of its requests",
            )
        clients.append(client)
    if not clients:
        raise UsageError(
            f"client key file {file} names no client", hint='write [NAME] and key_file = "FILE" below it'
        )
    return tuple(clients)


def _list_key_files(file: Path) -> list[Path]:
    """Return the key files that a client key file names, existing or not; none if it cannot be read."""
    try:
        tables = read_toml(file, "client key").values()
    except UsageError:
        return []
    named = [table.get("key_file") for table in tables if isinstance(table, dict)]
    return [_locate(file, one) for one in named if isinstance(one, str)]


def _locate(file: Path, key_file: str) -> Path:
    return file.parent / key_file


def _find_state(path: Path) -> FileState | None:
    try:
        return read_state(path)
    except OSError:
        return None
