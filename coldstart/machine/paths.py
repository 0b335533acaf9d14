"""Where coldstart keeps things, after the XDG base directory specification.

Everything that can be made again (bundles, tiny models) lives under one cache directory, moved as a whole by
``--cache-dir`` or ``COLDSTART_CACHE_DIR``. Keys and trust live in the state directory, which does not move
with it: a cache copied from elsewhere must not bring its own trust. No function creates a directory except
``runtime_dir``.
"""

import os
import stat
import tempfile
from pathlib import Path

from coldstart.contract import environment
from coldstart.contract.environment import Variable
from coldstart.errors import Usage


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


def cache_dir(override: Path | None = None) -> Path:
    """The cache root: ``override``, else COLDSTART_CACHE_DIR, else $XDG_CACHE_HOME/coldstart."""
    chosen = override or environment.CACHE_DIR.read()
    return expand(chosen).absolute() if chosen else _xdg(environment.XDG_CACHE_HOME, ".cache")


def store_dir(override: Path | None = None) -> Path:
    """The bundle store (an OCI image layout) inside the cache root."""
    return cache_dir(override) / "bundles"


def models_dir(override: Path | None = None) -> Path:
    """The models that coldstart builds itself, inside the cache root."""
    return cache_dir(override) / "models"


def unpacked_dir(override: Path | None = None) -> Path:
    """Sections unpacked for use, one directory per content digest, inside the cache root."""
    return cache_dir(override) / "unpacked"


def state_dir() -> Path:
    """The host's signing key and the keys the user trusts."""
    return _xdg(environment.XDG_STATE_HOME, ".local/state")


def config_file() -> Path:
    """The configuration file read when neither ``--config`` nor COLDSTART_CONFIG names one."""
    return _xdg(environment.XDG_CONFIG_HOME, ".config") / "config.toml"


def runtime_dir() -> Path:
    """A directory for sockets, owned by this user with mode 0700; made if missing.

    Raises Usage if it exists with another owner or is open to others: a socket in it could be replaced.
    """
    base = environment.XDG_RUNTIME_DIR.read()
    fallback = Path(tempfile.gettempdir()) / f"coldstart-{os.getuid()}"
    return _private(Path(base) / "coldstart" if Path(base).is_absolute() else fallback)


def frozen_dir() -> Path:
    """Where a process snapshot finds the files that it maps: one place per user, the same on every machine.

    A frozen process knows its files by absolute path, so this one follows neither HOME nor the cache root.
    """
    return _private(Path("/var/tmp") / f"coldstart-{os.getuid()}")


def _private(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise Usage(
            f"{path} must be a directory of this user with mode 0700, found mode "
            f"{stat.S_IMODE(found.st_mode):04o} and owner {found.st_uid}.",
            mend=f"remove it, or set XDG_RUNTIME_DIR: rm -r {path}",
        )
    return path
