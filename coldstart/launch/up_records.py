"""Records of the servers that `coldstart up` started: one directory per model and key, with the record and a log.

The runtime directory is the user's, whatever store they use. The name of a record's directory therefore begins with the
digest of the store and of the state directory that the server uses: a command sees only the servers of the same store. The
digest of the model follows: its servers start under one lock.

The record names the process that supervises the server, by PID and birth. A record of a process that has ended counts as none.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from coldstart.artifacts import canonical, files
from coldstart.contract.arguments import group_words
from coldstart.contract.environment import VLLM_API_KEY
from coldstart.launch import template_environment
from coldstart.models import inspection
from coldstart.models.aliases import ALIASES, NAMES
from coldstart.models.inspection import Lookup
from coldstart.system import paths, secrets
from coldstart.system.paths import Cache
from coldstart.system.proc import processes

STOP_TIMEOUT_S = 30.0
API_KEY = "API key"
"""Name of the setting that clients need, from --api-key, or from VLLM_API_KEY without it."""
_ADDRESS, _UNTRUSTED = ("host", "port"), "--untrusted"
_RECORD = "record.json"
_VERSION = re.compile(r":v\d+$|@sha256:[0-9a-f]+$")


@dataclass(frozen=True)
class UpRecord:
    """A supervised server. `url` and `mode` are None while it is prepared or starts.

    `planned_url` is known as soon as the port is chosen. `host` is the address at which it listens, which `url` may not show.
    `log` is the path of its log, None in the foreground.
    `argument` and `path` name the model on a command line, `pid` and `birth` identify the supervisor. `vllm_args` are for
    the user alone: their secrets are hidden. `settings` are those of `digest_settings`.
    """

    argument: str
    path: str
    key: str
    pid: int
    birth: str | None
    url: str | None = None
    mode: str | None = None
    vllm_args: tuple[str, ...] = ()
    host: str | None = None
    planned_url: str | None = None
    log: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_alive(self) -> bool:
        """Return whether the supervisor still runs."""
        return processes.is_alive(self.pid, self.birth)


@dataclass(frozen=True)
class UpDirectory:
    """Files of one model and key."""

    path: Path

    @property
    def log(self) -> Path:
        """Return the log of a server in the background."""
        return self.path / "log"

    def read(self) -> UpRecord | None:
        """Return the record of a supervisor that runs, None without one."""
        record = self.read_last()
        return record if record is not None and record.is_alive else None

    def read_last(self) -> UpRecord | None:
        """Return the record, also of a supervisor that was killed and could not remove it."""
        return _parse(self.path / _RECORD)

    def write(self, record: UpRecord) -> None:
        """Replace the record. Raises OSError."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        files.write_atomic(self.path / _RECORD, json.dumps(asdict(record)).encode(), mode=0o600)

    def end(self) -> None:
        """Remove the record unless another process that runs supervises the server, and retain the log."""
        if (running := self.read()) is None or running.pid == os.getpid():
            (self.path / _RECORD).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove record and log, unless a process starts a server of this model now."""
        if (handle := files.try_lock(self._lock)) is not None:
            if self.read() is None:
                for file in (self.path / _RECORD, self.log):
                    file.unlink(missing_ok=True)
                with suppress(OSError):  # a file that is not of `up` lies in it, or it is gone
                    self.path.rmdir()
            os.close(handle)

    def lock(self, stack: ExitStack, await_other: Callable[[], None]) -> None:
        """Hold the lock under which a server of this model starts, until `stack` is closed.

        Call `await_other` before waiting for another start of the model.
        """
        if (handle := files.try_lock(self._lock)) is None:
            await_other()
            stack.enter_context(files.locked(self._lock))
        else:
            stack.callback(os.close, handle)

    @property
    def _lock(self) -> Path:
        return self.path.with_name(f"{self.path.name.rpartition('-')[0]}.lock")


def identify_store(cache: Cache) -> str:
    """Return a short digest of this store and state, for names in directories that all stores of a user share."""
    home = f"{cache.root.resolve()}\0{paths.state_dir().resolve()}"
    return hashlib.sha256(home.encode()).hexdigest()[:8]


def find_directory(lookup: Lookup) -> UpDirectory:
    """Return the directory of the lookup's model and key. Raises UsageError if `paths.runtime_dir` does."""
    names = (str(lookup.model.path), lookup.key.digest)
    model, own = (hashlib.sha256(text.encode()).hexdigest()[:8] for text in names)
    return UpDirectory(_root() / f"{identify_store(lookup.cache)}-{model}-{own}")


def find_others(lookup: Lookup) -> list[UpRecord]:
    """Return the records of servers of the lookup's model that run or start under another key."""
    own = find_directory(lookup)
    beside = sorted(own.path.parent.glob(f"{own.path.name.rpartition('-')[0]}-*"))
    return [
        record for path in beside if path != own.path and (record := UpDirectory(path).read()) is not None
    ]


def describe_own(lookup: Lookup, planned_url: str | None = None) -> UpRecord:
    """Return the record of this process as the supervisor of the lookup's server, before it starts."""
    pid, model, shown = os.getpid(), lookup.model, secrets.arguments(lookup.vllm_args)
    own = UpRecord(model.argument, str(model.path), lookup.key.digest, pid, processes.birth(pid))
    settings = digest_settings(lookup, os.environ)
    return replace(own, vllm_args=tuple(shown), planned_url=planned_url, settings=settings)


def digest_settings(lookup: Lookup, environment: Mapping[str, str]) -> dict[str, str]:
    """Return a digest of each setting of a server: an option with dashes, a variable that its libraries read, or `API_KEY`.

    Secrets are among the settings, and a record must not help to guess them: the digests need a key.
    """
    relevant = template_environment.select_relevant(environment)
    settings = {name: [value] for name, value in relevant.items()}
    for name, words in group_words(lookup.vllm_args):
        if name not in _ADDRESS:
            settings.setdefault(f"--{name.replace('_', '-')}", []).extend(words)
    if any(keys := settings.pop("--api-key", [VLLM_API_KEY.read(environment)])):
        settings[API_KEY] = keys
    if lookup.accepts is not None and lookup.bundle is not None and not inspection.trust(lookup.bundle).ok:
        settings[_UNTRUSTED] = []
    path = paths.runtime_dir() / "up.key"
    if not path.exists():
        files.create_once(path, os.urandom(32), 0o600)
    key = files.read_regular(path)
    texts = {name: f"{name}\0{json.dumps(value)}" for name, value in settings.items()}
    return {name: hmac.new(key, text.encode(), "sha256").hexdigest() for name, text in texts.items()}


def list_differences(running: Mapping[str, str], asked: Mapping[str, str]) -> list[str]:
    """Return the names of the settings in which a running server differs from what is asked. A permission need not be used."""
    names = {name for name in {*running, *asked} if running.get(name) != asked.get(name)}
    return sorted(names if _UNTRUSTED in running else names - {_UNTRUSTED})


def list_directories(cache: Cache) -> list[UpDirectory]:
    """Return the directories of this store and state, with or without a server that runs.

    Raises UsageError under the same conditions as `paths.runtime_dir`.
    """
    places = sorted(_root().glob(f"{identify_store(cache)}-*"))
    return [UpDirectory(path) for path in places if path.is_dir()]


def stop(record: UpRecord, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """End the supervisor, and its server with it: SIGTERM, then SIGKILL after `timeout_s` seconds."""
    processes.end(record.pid, record.birth, timeout_s)


def list_names(word: str) -> set[str]:
    """Return the values of `argument` and `path` that `word` can mean on a command line; no model is looked up."""
    if word.lower() not in NAMES and paths.expand(word).is_dir():
        return {str(paths.expand(word).resolve())}
    word = _VERSION.sub("", word)
    names = {word, word.lower()}
    return names | {alias for alias, repository in ALIASES.items() if repository in names or alias in names}


def _root() -> Path:
    root = paths.runtime_dir() / "up"
    root.mkdir(mode=0o700, exist_ok=True)
    return root


def _parse(path: Path) -> UpRecord | None:
    try:
        record = UpRecord(**canonical.read(path))
        return replace(record, vllm_args=tuple(record.vllm_args), settings=dict(record.settings))
    except (OSError, ValueError, TypeError):
        return None
