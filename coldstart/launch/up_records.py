"""Records of the servers that `coldstart up` started: one directory for each model, with a record and a log.

The process that starts a model holds the lock on the file beside the directory, and later the server's supervisor holds
it. The kernel releases the lock when they exit, so a record whose lock is free belongs to a process that has exited.

All stores of a user share the runtime directory. The name of a record's directory therefore begins with a digest of the
store and the state directory, so that a command sees only the servers of its own store.
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
from coldstart.models.inspection import BundleLookup
from coldstart.system import paths
from coldstart.system.paths import Cache
from coldstart.system.proc import processes

STOP_TIMEOUT_S, KILL_TIMEOUT_S = 30.0, 5.0
API_KEY = "API key"
"""Name under which the API key is compared, whether it comes from --api-key or from VLLM_API_KEY."""
_ADDRESS = ("host", "port")
_RECORD = "record.json"
_VERSION = re.compile(r":v\d+$|@sha256:[0-9a-f]+$")
_POLL_S = 0.05


@dataclass(frozen=True)
class UpRecord:
    """Record of a supervised server. `url` and `mode` are None until the server is ready.

    `planned_url` is set once the port has been chosen. `host` is the listening address. `log` is the path of the log, or None
    for a server in the foreground. A command line can name the model by `argument`, as `up` received it, or by `path`. `pid`
    and `birth` identify the supervisor. `settings` are the digests that `digest_settings` computed with `salt`.
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
    """Directory that contains the record and the log of one model."""

    path: Path

    @property
    def log(self) -> Path:
        """Return the path of the log of a background server."""
        return self.path / "log"

    def read(self) -> UpRecord | None:
        """Return the record if its supervisor is running, or None otherwise."""
        if (handle := files.try_lock(self._lock)) is not None:
            os.close(handle)
            return None
        # The lock may be held by another command that only checks whether a supervisor holds it.
        record = self.read_last()
        return record if record is not None and processes.is_alive(record.pid, record.birth) else None

    def read_last(self) -> UpRecord | None:
        """Return the record even if its supervisor has exited, or None if there is no valid record."""
        try:
            return UpRecord(**canonical.read_json(self.path / _RECORD))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, record: UpRecord) -> None:
        """Create or replace the record. Raises OSError if it cannot be written."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        files.write_atomic(self.path / _RECORD, json.dumps(asdict(record)).encode(), mode=0o600)

    def end(self) -> None:
        """Remove the record of an exiting supervisor, but keep the log."""
        (self.path / _RECORD).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the record and the log unless a supervisor is running."""
        if (handle := files.try_lock(self._lock)) is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(handle)

    def claim(self, await_other: Callable[[], None]) -> UpRecord | int:
        """Return the record of the running server, or acquire the model's start lock and return its descriptor.

        If another process is starting the model, call `await_other` once, and then wait for that start.
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
    """Return a short digest of the store and state directory, for names in directories that a user's stores share."""
    home = f"{cache.root.resolve()}\0{paths.state_dir().resolve()}"
    return hashlib.sha256(home.encode()).hexdigest()[:8]


def find_directory(lookup: BundleLookup) -> UpDirectory:
    """Return the directory of the lookup's model. Raises UsageError under the same conditions as `paths.runtime_dir`."""
    model = hashlib.sha256(str(lookup.model.path or lookup.model.cli_argument).encode()).hexdigest()[:8]
    return UpDirectory(_root() / f"{identify_store(lookup.cache)}-{model}")


def create_own_record(lookup: BundleLookup) -> UpRecord:
    """Create a record, before the server starts, that names this process as the supervisor of the lookup's server."""
    pid, model, salt = os.getpid(), lookup.model, randomness.token_hex()
    return UpRecord(
        model.cli_argument,
        str(model.path),
        lookup.key.digest,
        pid,
        processes.read_identity(pid),
        salt,
        settings=digest_settings(lookup, salt),
    )


def digest_settings(lookup: BundleLookup, salt: str) -> dict[str, str]:
    """Return a salted digest of each server setting, by option name. The name of the API key is API_KEY.

    With these digests, settings can be compared without storing secrets.
    """
    settings: dict[str, list[str]] = {}
    for name, words in group_by_flag(lookup.vllm_args):
        if name not in _ADDRESS:
            settings.setdefault(f"--{name.replace('_', '-')}", []).extend(words)
    if any(keys := settings.pop("--api-key", [VLLM_API_KEY.read()])):
        settings[API_KEY] = keys
    texts = {name: json.dumps([salt, name, value]) for name, value in settings.items()}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


def list_differences(running: UpRecord, lookup: BundleLookup) -> list[str]:
    """Return the names of the settings that differ between a running server and the lookup's arguments."""
    asked = digest_settings(lookup, running.salt)
    every = {*running.settings, *asked}
    return sorted(name for name in every if running.settings.get(name) != asked.get(name))


def list_directories(cache: Cache) -> list[UpDirectory]:
    """Return the directories of all models of this store, whether or not their servers are running.

    Raises UsageError under the same conditions as `paths.runtime_dir`.
    """
    places = sorted(_root().glob(f"{identify_store(cache)}-*"))
    return [UpDirectory(path) for path in places if path.is_dir()]


def stop_supervisor(record: UpRecord) -> None:
    """Stop the supervisor and its server with SIGTERM, and with SIGKILL after `STOP_TIMEOUT_S` seconds."""
    # At the second SIGTERM, a supervisor kills its server. If it were killed itself, a server that hangs would remain.
    processes.terminate(record.pid, record.birth, STOP_TIMEOUT_S, KILL_TIMEOUT_S)


def list_possible_model_names(word: str) -> set[str]:
    """Return the names in `UpRecord.argument` or `UpRecord.path` to which the command-line argument `word` can refer."""
    if word.lower() not in NAMES and paths.expand_user(word).is_dir():
        return {str(paths.expand_user(word).resolve())}
    word = _VERSION.sub("", word)
    names = {word, word.lower()}
    return names | {alias for alias, repository in ALIASES.items() if repository in names or alias in names}


def _root() -> Path:
    root = paths.runtime_dir() / "up"
    root.mkdir(mode=0o700, exist_ok=True)
    return root
