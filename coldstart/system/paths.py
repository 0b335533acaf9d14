"""Where coldstart keeps things, after the XDG base directory specification.

Everything that can be made again (bundles, tiny models) lives under one cache directory, moved as a whole by
``--cache-dir`` or ``COLDSTART_CACHE_DIR``. Keys and trust live in the state directory, which does not move
with it: a cache copied from elsewhere must not bring its own trust. No function creates a directory except
``runtime_dir`` and ``frozen_dir``, whose directories are private from birth: where somebody else has taken
the name, another one is made and remembered in the state directory.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from coldstart.artifacts import files
from coldstart.contract import environment
from coldstart.contract.environment import Variable
from coldstart.errors import UsageError
from coldstart.system.trust import ownership


def _xdg(variable: Variable[str], fallback: str) -> Path:
    value = variable.read()
    # The specification says that a relative value is invalid and is to be ignored.
    base = Path(value) if Path(value).is_absolute() else Path.home() / fallback
    return base / "coldstart"


def expand(path: str | Path) -> Path:
    """``path`` with ~ and ~user replaced; as it is where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


@dataclass(frozen=True)
class Cache:
    """The cache root and what lies where in it; chosen once, on the command line."""

    root: Path

    @classmethod
    def at(cls, override: Path | None = None) -> Cache:
        """The cache at ``override``, else COLDSTART_CACHE_DIR, else $XDG_CACHE_HOME/coldstart."""
        chosen = override or environment.CACHE_DIR.read()
        return cls(expand(chosen).absolute() if chosen else _xdg(environment.XDG_CACHE_HOME, ".cache"))

    @property
    def bundles(self) -> Path:
        """The bundle store (an OCI image layout)."""
        return self.root / "bundles"

    @property
    def models(self) -> Path:
        """The models that coldstart builds itself."""
        return self.root / "models"

    @property
    def unpacked(self) -> Path:
        """Sections unpacked for use, one directory per content digest."""
        return self.root / "unpacked"

    @property
    def writable(self) -> Path:
        """The root where this user can write and nobody else can, else a private place: for what is made at a start.

        A cache on a read-only volume or of another user serves its bundles; nothing is written to it, no code run from it.
        """
        nearest = next(place for place in (self.root, *self.root.parents) if place.exists())
        if os.access(nearest, os.W_OK | os.X_OK) and ownership.fault(self.root) is None:
            return self.root
        return frozen_dir() / "cache"

    @property
    def weights(self) -> Path:
        """Digests of weights, plans of them, and what their sources gave."""
        return self.writable / "weights"

    @property
    def runtimes(self) -> Path:
        """Images of processes with the runtime imported, one directory for each interpreter and its versions."""
        return self.writable / "runtime"

    @property
    def work(self) -> Path:
        """Work directories of materializations, one per run."""
        return self.root / "work"

    def vllm(self, key: str) -> Path:
        """vLLM's own caches for the key with this digest."""
        return self.writable / "vllm" / key.removeprefix("sha256:")[:12]


def state_dir() -> Path:
    """The host's signing key and the keys the user trusts."""
    return _xdg(environment.XDG_STATE_HOME, ".local/state")


def compiled_dir() -> Path:
    """Caches of a GPU engine's compilers, one directory for each `compile` section."""
    return state_dir() / "compiled"


def config_file() -> Path:
    """The configuration file read when neither ``--config`` nor COLDSTART_CONFIG names one."""
    return _xdg(environment.XDG_CONFIG_HOME, ".config") / "config.toml"


def runtime_dir() -> Path:
    """A directory for sockets, owned by this user with mode 0700; made if missing.

    Raises UsageError where none can be had.
    """
    base = environment.XDG_RUNTIME_DIR.read()
    fallback = Path(tempfile.gettempdir()) / f"coldstart-{os.getuid()}"
    return _private(Path(base) / "coldstart" if Path(base).is_absolute() else fallback)


def temporary_dir() -> Path:
    """Where servers have their temporary files: a private directory below the one for such. Raises UsageError."""
    return _private(Path(tempfile.gettempdir()).absolute() / f"coldstart-{os.getuid()}")


def frozen_dir() -> Path:
    """Where a process snapshot finds the files that it maps: one place per user, the same on every machine.

    A frozen process knows its files by absolute path, so this one follows neither HOME nor the cache root. Raises UsageError.
    """
    return _private(Path("/var/tmp") / f"coldstart-{os.getuid()}")


def _private(wanted: Path) -> Path:
    if (reason := ownership.private(wanted)) is None:
        return wanted
    remembered = state_dir() / "places" / str(wanted).strip("/").replace("/", "%")
    if remembered.is_symlink() and ownership.private(stand_in := remembered.readlink()) is None:
        return stand_in
    try:
        return _stand_in(wanted, remembered)
    except OSError as error:
        raise UsageError(
            f"A private directory is wanted, but {reason}, and none can be made beside it: {error.strerror}.",
            hint=f"remove it, or set XDG_RUNTIME_DIR: rm -r {wanted}",
        ) from error


def _stand_in(wanted: Path, remembered: Path) -> Path:
    """A directory of a name that nobody could foresee, remembered by a link: a link is made by one process alone."""
    files.make_private(remembered.parent)
    place = (
        wanted.parent
        if wanted.parent.is_dir() and os.access(wanted.parent, os.W_OK)
        else tempfile.gettempdir()
    )
    directory = Path(tempfile.mkdtemp(prefix=f"{wanted.name}-", dir=place))
    if (reason := ownership.private(directory)) is not None:
        directory.rmdir()
        raise OSError(0, reason)
    if remembered.is_symlink() and ownership.private(remembered.readlink()) is not None:
        remembered.unlink()
    try:
        remembered.symlink_to(directory)
    except FileExistsError:  # another process was faster
        directory.rmdir()
    return remembered.readlink()
