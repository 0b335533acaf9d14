"""Named API keys of a gateway's clients: the models that each client may use.

[laptop]                        # name of the client in metrics and errors; its key appears in neither
key_file = "/run/keys/laptop"   # absolute, or relative to this file
models = ["tiny-llama"]         # optional: names of models; default: all models
admin = false                   # true: the client may also read status, metrics and logs, and control the host

A file without tables is valid: its keys are all revoked.

Invariant: no key is part of an error, a representation or a comparison whose time depends on its content.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from coldstart.errors import UsageError
from coldstart.host.tables import decode, expect_table, read_toml
from coldstart.system.file_state import FileState, find_state
from coldstart.system.key_file import describe_exposure, read_key

if TYPE_CHECKING:
    from coldstart.host.launches import Catalogue


@dataclass(frozen=True, slots=True)
class ClientKey:
    """One client: its key and its rights."""

    name: str
    key_file: str
    key: bytes = field(repr=False, compare=False)
    models: tuple[str, ...] | None = None
    admin: bool = False

    def may_use(self, asked: str | None, catalogue: Catalogue) -> bool:
        """Return whether the client may use the model that a request for the name `asked` reaches."""
        if self.models is None:
            return True
        route = catalogue.route(asked)
        allowed = (catalogue.route(name) for name in self.models)
        return route is not None and route.model in {one.model for one in allowed if one is not None}


class ClientKeys:
    """The clients of one file. The file and its key files are read again when they change.

    Raises:
        UsageError: the file or a key file cannot be used.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._states: dict[Path, FileState | None] = {}
        self.clients: tuple[ClientKey, ...] = ()
        self.changed_at = time.monotonic()
        self.read()

    def find(self, key: bytes) -> ClientKey | None:
        """Return the client with this key, or None."""
        # Compare with every key, so that the time does not show which one begins alike.
        found = [client for client in self.clients if hmac.compare_digest(client.key, key)]
        return found[0] if found else None

    def has_admin(self) -> bool:
        """Return whether a client may control the host."""
        return any(client.admin for client in self.clients)

    def describe_unknown_models(self, catalogue: Catalogue) -> Iterator[str]:
        """Yield a sentence for each name in a client's `models` that no request can reach now."""
        for client in self.clients:
            for name in client.models or ():
                if catalogue.route(name) is None:
                    yield f"the client {client.name} may use {name}, but no model has this name"

    def describe_exposed_files(self) -> Iterator[str]:
        """Yield a warning for each key file that other users can read."""
        notes = (describe_exposure(_locate(self.file, client.key_file)) for client in self.clients)
        yield from filter(None, notes)

    def have_changed(self) -> bool:
        """Return whether a file differs from the one that was read last."""
        return any(find_state(path) != state for path, state in self._states.items())

    def read(self) -> dict[str, list[str]]:
        """Read the files again and return the changes by kind. After an error the former clients remain.

        Raises:
            UsageError: the files cannot be used.
        """
        # Record the state of each file before it is read, and also where it cannot be: a later change is then seen.
        self._states = {self.file: find_state(self.file)}
        tables = read_toml(self.file, "client key")
        self._states |= {path: find_state(path) for path in _list_key_files(self.file, tables)}
        try:
            clients = parse_clients(self.file, tables)
        except UsageError as error:
            raise UsageError(f"client key file {self.file}: {error.message}", hint=error.hint) from error
        changes = describe_client_changes(self.clients, clients)
        if any(changes.values()):
            self.clients, self.changed_at = clients, time.monotonic()
        return changes


def parse_clients(file: Path, tables: Mapping[str, object]) -> tuple[ClientKey, ...]:
    """Return the clients of the content of a file, with the keys of their key files.

    Raises:
        UsageError: a key file cannot be read, an entry is unknown, or two clients have the same key.
    """
    clients: dict[bytes, ClientKey] = {}
    for name, given in tables.items():
        table = expect_table(given, name)
        path = table.get("key_file")
        key = read_key(_locate(file, path)).encode() if isinstance(path, str) else b""
        client = decode(ClientKey, table, name, name=name, key=key)
        if (other := clients.setdefault(key, client)) is not client:
            raise UsageError(
                f"{other.name} and {name} have the same key",
                hint="write another key: openssl rand -hex 32",
            )
    return tuple(clients.values())


def describe_client_changes(
    before: Collection[ClientKey], after: Collection[ClientKey]
) -> dict[str, list[str]]:
    """Return the names of the clients that were added, removed or changed; another key is a change too."""
    old, new = ({client.name: client for client in clients} for clients in (before, after))
    both = [(old[name], new[name]) for name in new if name in old]
    return {
        "added": [name for name in new if name not in old],
        "removed": [name for name in old if name not in new],
        "changed": [one.name for one, two in both if one != two or not hmac.compare_digest(one.key, two.key)],
    }


def _list_key_files(file: Path, tables: Mapping[str, object]) -> list[Path]:
    """Return the key files that the content of a client key file names, existing or not."""
    named = [table.get("key_file") for table in tables.values() if isinstance(table, dict)]
    return [_locate(file, one) for one in named if isinstance(one, str)]


def _locate(file: Path, key_file: str) -> Path:
    return file.parent / key_file
