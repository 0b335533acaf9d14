"""Records of the servers that `coldstart up` started: one directory per model, with the record and a log.

The process that brings a model up, and then the one that supervises its server, holds the lock beside the directory. The
kernel releases it with the last of them, so a record whose lock is free belongs to a process that has ended.

The runtime directory is the user's, whatever store they use. The name of a record's directory therefore begins with the
digest of the store and of the state directory that the server uses: a command sees only the servers of the same store.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets as randomness
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from coldstart.artifacts import canonical, files
from coldstart.contract.arguments import group_by_flag
from coldstart.contract.environment import VLLM_API_KEY
from coldstart.models.aliases import ALIASES, NAMES
from coldstart.models.inspection import Lookup
from coldstart.system import paths
from coldstart.system.paths import Cache
from coldstart.system.proc import processes

STOP_TIMEOUT_S = 30.0
API_KEY = "API key"
"""Name of the setting that clients need, from --api-key, or from VLLM_API_KEY without it."""
_ADDRESS = ("host", "port")
_RECORD = "record.json"
_VERSION = re.compile(r":v\d+$|@sha256:[0-9a-f]+$")
_POLL_S = 0.05


@dataclass(frozen=True)
class UpRecord:
    """A supervised server. `url` and `mode` are None while it is prepared or starts.

    `planned_url` is known as soon as the port is chosen. `host` is the address at which it listens, which `url` may not show.
    `log` is the path of its log, None in the foreground. `argument` and `path` name the model on a command line, `pid` and
    `birth` identify the supervisor. `settings` are those of `digest_settings` with `salt`.
    """

    argument: str
    path: str
    key: str
    pid: int
    birth: str | None
    salt: str
    url: str | None = None
    mode: str | None = None
    host: str | None = None
    planned_url: str | None = None
    log: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class UpDirectory:
    """Files of one model."""

    path: Path

    @property
    def log(self) -> Path:
        """Return the log of a server in the background."""
        return self.path / "log"

    def read(self) -> UpRecord | None:
        """Return the record of a supervisor that runs, None without one."""
        if (handle := files.try_lock(self._lock)) is not None:
            os.close(handle)
            return None
        # Another command may hold the lock for a moment, to look whether a supervisor does.
        record = self.read_last()
        return record if record is not None and processes.is_alive(record.pid, record.birth) else None

    def read_last(self) -> UpRecord | None:
        """Return the record, also of a supervisor that has ended."""
        try:
            return UpRecord(**canonical.read_json(self.path / _RECORD))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, record: UpRecord) -> None:
        """Replace the record. Raises OSError."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        files.write_atomic(self.path / _RECORD, json.dumps(asdict(record)).encode(), mode=0o600)

    def end(self) -> None:
        """Remove the record of a supervisor that ends, and retain the log."""
        (self.path / _RECORD).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove record and log unless a supervisor runs."""
        if (handle := files.try_lock(self._lock)) is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(handle)

    def claim(self, await_other: Callable[[], None]) -> UpRecord | int:
        """Return the record of the server that is up, or else the lock of the model, for the process that starts one.

        Wait for another start of the model, after a call of `await_other`. The lock is a descriptor.
        """
        waits = False
        while (handle := files.try_lock(self._lock)) is None:
            record = self.read()
            if record is not None and record.url is not None:
                return record
            if not waits:
                await_other()
                waits = True
            time.sleep(_POLL_S)
        return handle

    @property
    def _lock(self) -> Path:
        return self.path.with_suffix(".lock")


def identify_store(cache: Cache) -> str:
    """Return a short digest of this store and state, for names in directories that all stores of a user share."""
    home = f"{cache.root.resolve()}\0{paths.state_dir().resolve()}"
    return hashlib.sha256(home.encode()).hexdigest()[:8]


def find_directory(lookup: Lookup) -> UpDirectory:
    """Return the directory of the lookup's model. Raises UsageError if `paths.runtime_dir` does."""
    model = hashlib.sha256(str(lookup.model.path or lookup.model.argument).encode()).hexdigest()[:8]
    return UpDirectory(_root() / f"{identify_store(lookup.cache)}-{model}")


def describe_own(lookup: Lookup) -> UpRecord:
    """Return the record of this process as the supervisor of the lookup's server, before it starts."""
    pid, model, salt = os.getpid(), lookup.model, randomness.token_hex()
    return UpRecord(
        model.argument,
        str(model.path),
        lookup.key.digest,
        pid,
        processes.read_identity(pid),
        salt,
        settings=digest_settings(lookup, salt),
    )


def digest_settings(lookup: Lookup, salt: str) -> dict[str, str]:
    """Return a salted digest of each setting of a server: an option with dashes, or `API_KEY`. Secrets are among them."""
    settings: dict[str, list[str]] = {}
    for name, words in group_by_flag(lookup.vllm_args):
        if name not in _ADDRESS:
            settings.setdefault(f"--{name.replace('_', '-')}", []).extend(words)
    if any(keys := settings.pop("--api-key", [VLLM_API_KEY.read()])):
        settings[API_KEY] = keys
    texts = {name: json.dumps([salt, name, value]) for name, value in settings.items()}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


def list_differences(running: UpRecord, lookup: Lookup) -> list[str]:
    """Return the names of the settings in which a running server differs from what the lookup asks for."""
    asked = digest_settings(lookup, running.salt)
    every = {*running.settings, *asked}
    return sorted(name for name in every if running.settings.get(name) != asked.get(name))


def list_directories(cache: Cache) -> list[UpDirectory]:
    """Return the directories of this store and state, with or without a server that runs.

    Raises UsageError under the same conditions as `paths.runtime_dir`.
    """
    places = sorted(_root().glob(f"{identify_store(cache)}-*"))
    return [UpDirectory(path) for path in places if path.is_dir()]


def stop(record: UpRecord, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """End the supervisor, and its server with it: SIGTERM, then SIGKILL after `timeout_s` seconds."""
    processes.terminate(record.pid, record.birth, timeout_s)


def list_names(word: str) -> set[str]:
    """Return the values of `argument` and `path` that `word` can mean on a command line; no model is looked up."""
    if word.lower() not in NAMES and paths.expand_user(word).is_dir():
        return {str(paths.expand_user(word).resolve())}
    word = _VERSION.sub("", word)
    names = {word, word.lower()}
    return names | {alias for alias, repository in ALIASES.items() if repository in names or alias in names}


def _root() -> Path:
    root = paths.runtime_dir() / "up"
    root.mkdir(mode=0o700, exist_ok=True)
    return root
