"""Directories of coldstart, after the XDG base directory specification.

Everything that can be rebuilt (bundles, tiny models) is below one cache directory, which ``--cache-dir`` or
``COLDSTART_CACHE_DIR`` moves. Keys and trust settings are in the state directory, which does not move with the cache: a cache
copied from another machine must not bring its own trust. Only the functions that return a private directory create
directories, with mode 0700. A runtime or temporary directory in which no private directory can be is not used, but another
place, as where another user has the name.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from coldstart.artifacts import ownership
from coldstart.contract import environment
from coldstart.contract.environment import Variable
from coldstart.errors import UsageError
from coldstart.system.ipc.peers import LONGEST_PATH

# Other places for sockets and temporary files: in a container any of them may be the only one that can be written.
_PLACES = ("/tmp", "/var/tmp", "/dev/shm")


HOMELESS = "set HOME, or COLDSTART_CACHE_DIR, XDG_STATE_HOME and, for models of the hub, HF_HOME"
"""Hint for a user without a home directory to write to, as containers have."""


def _xdg(variable: Variable[str], fallback: str) -> Path:
    value = variable.read()
    # The specification declares relative values invalid; they are ignored.
    if Path(value).is_absolute():
        return Path(value) / "coldstart"
    home = expand("~")
    if not home.is_absolute():
        raise UsageError(
            f"cannot choose a directory for ~/{fallback}/coldstart: user {os.getuid()} has no home directory",
            hint=HOMELESS,
        )
    return home / fallback / "coldstart"


def expand(path: str | Path) -> Path:
    """Return ``path`` with ~ and ~user replaced, unchanged if the user does not exist or has no home directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def is_below_home(path: str | Path) -> bool:
    """Return whether `path` is where files are if no variable names a directory."""
    home = expand("~")
    return Path(path) == home or any(Path(path).is_relative_to(home / name) for name in (".cache", ".local"))


@dataclass(frozen=True)
class Cache:
    """The cache root and its subdirectories; chosen once, on the command line."""

    root: Path

    @classmethod
    def at(cls, override: Path | None = None) -> Cache:
        """Return the cache at ``override``, else COLDSTART_CACHE_DIR, else $XDG_CACHE_HOME/coldstart.

        Raises:
            UsageError: None is set, and the user has no home directory.
        """
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
        return choose_writable(self.root, "cache")

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
    """Return the directory of this machine's signing key and the trusted keys. Raises UsageError if `Cache.at` does."""
    return _xdg(environment.XDG_STATE_HOME, ".local/state")


def compiled_dir() -> Path:
    """Return the directory of a GPU engine's compiler caches, one subdirectory per `compile` section."""
    return state_dir() / "compiled"


def runtime_dir(below: int = 0) -> Path:
    """Return the directory for sockets, owned by this user with mode 0700. Create it if it is missing.

    It is below XDG_RUNTIME_DIR or the temporary directory, or in another place if that one is not safe, cannot be written or is
    too long for a socket.

    Args:
        below: Bytes of the path of the longest socket, relative to the directory, that another program binds there.

    Raises:
        UsageError: No private directory can be created.
    """
    return _choose([*_list_xdg(), *_list_temporary()], below)


def temporary_dir(below: int = 0) -> Path:
    """Return the private directory for temporary files of servers, the temporary directory before others; as `runtime_dir`."""
    own, *more = _list_temporary()
    return _choose([own, *_list_xdg(), *more], below)


def describe_other_runtime_dir() -> str | None:
    """Return why the sockets are not in XDG_RUNTIME_DIR but in another directory, or None."""
    for wanted in _list_xdg():
        with suppress(UsageError):  # where a socket is needed, the error has the reasons
            if (place := runtime_dir()).parent != wanted.parent:
                return f"XDG_RUNTIME_DIR is not used: {_claim(wanted)}. Sockets are in {place}."
    return None


def frozen_dir() -> Path:
    """Return the directory of the files that process snapshots map: one per user, with the same path on every machine.

    A frozen process refers to its files by absolute path, so this path depends on neither HOME nor the cache root.
    Raises UsageError where another user has the name.
    """
    place = _name_frozen_dir()
    if (reason := _claim(place)) is not None:
        raise UsageError(f"cannot create a private directory: {reason}", hint=f"rm -r {place}")
    return place


def choose_writable(root: Path, name: str) -> Path:
    """Return `root` if this user can write to it and no other user can, else the directory `name` in a private one.

    Raises UsageError if `runtime_dir` does."""
    if os.access(_find_nearest(root), os.W_OK | os.X_OK) and ownership.describe_path_exposure(root) is None:
        return root
    return _choose([_name_frozen_dir(), *_list_temporary()], 0) / name


def _name_frozen_dir() -> Path:
    return Path("/var/tmp") / f"coldstart-{os.getuid()}"


def _list_xdg() -> list[Path]:
    base = environment.XDG_RUNTIME_DIR.read()
    return [Path(base) / "coldstart"] if Path(base).is_absolute() else []


def _list_temporary() -> list[Path]:
    name = f"coldstart-{os.getuid()}"
    temporary = Path(tempfile.gettempdir()).absolute()
    # A server's temporary directory is in that of its user (system/proc/scratch.py), whose sockets it shares.
    is_server = f"{temporary.parent.name}-".startswith(f"{name}-")
    own = temporary.parent if is_server else temporary / name
    return list(dict.fromkeys([own, *(Path(base, name) for base in _PLACES)]))


def _choose(places: Sequence[Path], below: int) -> Path:
    """Return the first of `places` that is or can become private. Raises UsageError."""
    reasons = list[str]()
    for place in places:
        if (reason := _claim(place, below)) is None:
            return place
        reasons.append(reason)
    raise UsageError(
        ["cannot create a private directory for sockets:", *reasons],
        hint="set XDG_RUNTIME_DIR to a directory that only you can write to",
    )


def _claim(place: Path, below: int = 0) -> str | None:
    """Create `place` as a private directory if it is missing. Return why it cannot be one, None if it is."""
    if below and len(os.fsencode(place)) + below > LONGEST_PATH:
        return f"{place} is too long for a unix socket"
    if (reason := ownership.describe_path_exposure(place.parent)) is not None:
        return reason
    nearest = _find_nearest(place.parent)
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest} cannot be written"
    return ownership.ensure_private_directory(place)


def _find_nearest(place: Path) -> Path:
    """Return `place`, or the nearest of its parents that exists as far as this user can see."""
    return next(one for one in (place, *place.parents) if os.path.exists(one))  # noqa: PTH110 - never raises
