"""Directories of coldstart, after the XDG base directory specification.

Everything that can be rebuilt (bundles, tiny models) is below one cache directory, which ``--cache-dir`` or
``COLDSTART_CACHE_DIR`` moves. Keys and trust settings are in the state directory, which does not move with the cache: a cache
copied from another machine must not bring its own trust. Only ``runtime_dir``, ``temporary_dir`` and ``frozen_dir`` create
directories, with mode 0700. If another user owns the name, they create another directory and record it in the state directory.
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
    # The specification declares relative values invalid; they are ignored.
    base = Path(value) if Path(value).is_absolute() else Path.home() / fallback
    return base / "coldstart"


def expand(path: str | Path) -> Path:
    """Return ``path`` with ~ and ~user replaced, unchanged if the user does not exist."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


@dataclass(frozen=True)
class Cache:
    """The cache root and its subdirectories; chosen once, on the command line."""

    root: Path

    @classmethod
    def at(cls, override: Path | None = None) -> Cache:
        """Return the cache at ``override``, else COLDSTART_CACHE_DIR, else $XDG_CACHE_HOME/coldstart."""
        chosen = override or environment.CACHE_DIR.read()
        return cls(expand(chosen).absolute() if chosen else _xdg(environment.XDG_CACHE_HOME, ".cache"))

    @property
    def bundles(self) -> Path:
        """Return the bundle store (an OCI image layout)."""
        return self.root / "bundles"

    @property
    def models(self) -> Path:
        """Return the directory of the models that coldstart builds itself."""
        return self.root / "models"

    @property
    def unpacked(self) -> Path:
        """Return the directory of unpacked sections, one subdirectory per content digest."""
        return self.root / "unpacked"

    @property
    def writable(self) -> Path:
        """Return the root if only this user can write to it, else a private directory, for files that starts create.

        A cache on a read-only volume or of another user provides its bundles. Starts neither write to it nor run code from it.
        """
        nearest = next(place for place in (self.root, *self.root.parents) if place.exists())
        if os.access(nearest, os.W_OK | os.X_OK) and ownership.fault(self.root) is None:
            return self.root
        return frozen_dir() / "cache"

    @property
    def weights(self) -> Path:
        """Return the directory of weight digests, weight plans and measured rates of sources."""
        return self.writable / "weights"

    @property
    def runtimes(self) -> Path:
        """Return the directory of runtime images, one subdirectory for each interpreter and its versions."""
        return self.writable / "runtime"

    @property
    def work(self) -> Path:
        """Return the directory of materializations in progress, one subdirectory per run."""
        return self.root / "work"

    def vllm(self, key: str) -> Path:
        """Return the directory of vLLM's own caches for the key with this digest."""
        return self.writable / "vllm" / key.removeprefix("sha256:")[:12]


def state_dir() -> Path:
    """Return the directory of this machine's signing key and the trusted keys."""
    return _xdg(environment.XDG_STATE_HOME, ".local/state")


def compiled_dir() -> Path:
    """Return the directory of a GPU engine's compiler caches, one subdirectory per `compile` section."""
    return state_dir() / "compiled"


def config_file() -> Path:
    """Return the configuration file that is read if neither ``--config`` nor COLDSTART_CONFIG names one."""
    return _xdg(environment.XDG_CONFIG_HOME, ".config") / "config.toml"


def runtime_dir() -> Path:
    """Return the directory for sockets, owned by this user with mode 0700. Create it if it is missing.

    Raises:
        UsageError: No private directory can be created.
    """
    base = environment.XDG_RUNTIME_DIR.read()
    fallback = Path(tempfile.gettempdir()) / f"coldstart-{os.getuid()}"
    return _private(Path(base) / "coldstart" if Path(base).is_absolute() else fallback)


def temporary_dir() -> Path:
    """Return the private directory for temporary files of servers. Raises UsageError as `runtime_dir`."""
    return _private(Path(tempfile.gettempdir()).absolute() / f"coldstart-{os.getuid()}")


def frozen_dir() -> Path:
    """Return the directory of the files that process snapshots map: one per user, with the same path on every machine.

    A frozen process refers to its files by absolute path, so this path depends on neither HOME nor the cache root.
    Raises UsageError as `runtime_dir`.
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
            f"Cannot create a private directory: {reason}, and creating one beside it failed: {error.strerror}.",
            hint=f"rm -r {wanted}, or set XDG_RUNTIME_DIR",
        ) from error


def _stand_in(wanted: Path, remembered: Path) -> Path:
    """Create a directory with an unpredictable name and record it as a link, which only one process can create."""
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
    except FileExistsError:  # another process created it first
        directory.rmdir()
    return remembered.readlink()
