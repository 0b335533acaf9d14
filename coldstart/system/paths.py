"""Directories of coldstart, following the XDG base directory specification.

Everything that can be rebuilt (bundles, tiny models) is below one cache directory, which `--cache-dir` or
`COLDSTART_CACHE_DIR` moves. Keys and trust settings are in the state directory, which does not move with the cache: a
cache copied from another machine must not bring its own trust. Only functions that return a private directory create
directories, with mode 0700. If a runtime or temporary directory cannot contain a private directory, for example because
another user owns a directory of that name, another location is used.
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
from coldstart.system.ipc.peers import MAX_SOCKET_PATH_BYTES

# Other locations for sockets and temporary files. In a container, any of them may be the only writable one.
_PLACES = ("/tmp", "/var/tmp", "/dev/shm")


NO_HOME_HINT = "set HOME, or COLDSTART_CACHE_DIR, XDG_STATE_HOME and, for models of the hub, HF_HOME"
"""Hint for a user without a writable home directory, as in containers."""


def _choose_xdg_directory(variable: Variable[str], fallback: str) -> Path:
    value = variable.read()
    # The specification declares relative values invalid; they are ignored.
    if Path(value).is_absolute():
        return Path(value) / "coldstart"
    home = expand_user("~")
    if not home.is_absolute():
        raise UsageError(
            f"cannot locate ~/{fallback}/coldstart: user {os.getuid()} has no home directory",
            hint=NO_HOME_HINT,
        )
    return home / fallback / "coldstart"


def expand_user(path: str | Path) -> Path:
    """Return `path` with ~ and ~user expanded, or unchanged if the user does not exist or has no home directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def is_below_home(path: str | Path) -> bool:
    """Return whether `path` is the home directory or is in its .cache or .local, the default locations of files."""
    home = expand_user("~")
    return Path(path) == home or any(Path(path).is_relative_to(home / name) for name in (".cache", ".local"))


@dataclass(frozen=True)
class Cache:
    """Cache root and its subdirectories. The command line chooses the root once."""

    root: Path

    @classmethod
    def at(cls, override: Path | None = None) -> Cache:
        """Return the cache at `override` if it is set, else at COLDSTART_CACHE_DIR, else at $XDG_CACHE_HOME/coldstart.

        Raises:
            UsageError: None of them is set, and the user has no home directory.
        """
        chosen = override or environment.CACHE_DIR.read()
        return cls(
            expand_user(chosen).absolute()
            if chosen
            else _choose_xdg_directory(environment.XDG_CACHE_HOME, ".cache")
        )

    @property
    def bundles(self) -> Path:
        """Return the bundle store (an OCI image layout)."""
        return self.root / "bundles"

    @property
    def models(self) -> Path:
        """Return the directory of models that coldstart itself builds."""
        return self.root / "models"

    @property
    def unpacked(self) -> Path:
        """Return the directory of unpacked sections, one subdirectory per content digest."""
        return self.root / "unpacked"

    @property
    def writable_root(self) -> Path:
        """Return the root if only this user can write to it, or else a private directory, for files that starts create.

        A cache that is on a read-only volume or belongs to another user still provides its bundles. Starts neither write
        to it nor run code from it.
        """
        return choose_writable(self.root, "cache")

    @property
    def weights(self) -> Path:
        """Return the directory of weight digests, weight plans and measured bandwidths of sources."""
        return self.writable_root / "weights"

    @property
    def runtimes(self) -> Path:
        """Return the directory of runtime snapshots, one subdirectory per interpreter and its package versions."""
        return self.writable_root / "runtime"

    @property
    def unfinished_materializations(self) -> Path:
        """Return the directory of unfinished materializations, one subdirectory per run."""
        return self.root / "work"

    def vllm_cache_dir(self, key: str) -> Path:
        """Return the directory of vLLM's own caches for the bundle key with the digest `key`."""
        return self.writable_root / "vllm" / key.removeprefix("sha256:")[:12]


def state_dir() -> Path:
    """Return the directory of this machine's signing key and trusted keys.

    Raises UsageError if the user has no home directory.
    """
    return _choose_xdg_directory(environment.XDG_STATE_HOME, ".local/state")


def compiled_dir() -> Path:
    """Return the directory of compiler caches of GPU engines, one subdirectory per `compile` section."""
    return state_dir() / "compiled"


def runtime_dir(socket_path_bytes: int = 0) -> Path:
    """Return the directory for sockets, owned by this user with mode 0700. Create it if it is missing.

    It is below XDG_RUNTIME_DIR or the temporary directory, or elsewhere if those are not private, not writable, or too
    long for a socket path.

    Args:
        socket_path_bytes: Length in bytes, relative to the directory, of the longest socket path that a program binds in it.

    Raises:
        UsageError: No private directory can be created.
    """
    return _choose_private_directory([*_list_xdg(), *_list_temporary()], socket_path_bytes)


def temporary_dir(socket_path_bytes: int = 0) -> Path:
    """Return the private directory for temporary files of servers, below the temporary directory if possible.

    The argument and the errors are the same as for `runtime_dir`.
    """
    own, *more = _list_temporary()
    return _choose_private_directory([own, *_list_xdg(), *more], socket_path_bytes)


def describe_other_runtime_dir() -> str | None:
    """Return a message with the reason why XDG_RUNTIME_DIR is not used for sockets, or None if it is used or unset."""
    for wanted in _list_xdg():
        with suppress(UsageError):  # if a socket is needed, the error gives the reasons
            if (place := runtime_dir()).parent != wanted.parent:
                return f"XDG_RUNTIME_DIR is not used: {_claim_directory(wanted)}; sockets are in {place}"
    return None


def frozen_dir() -> Path:
    """Return this user's directory of the sockets of frozen templates. Raises UsageError if another user owns it.

    An image contains the path of its socket, which must be short, so the path depends on neither HOME nor the cache root.
    """
    place = _name_frozen_dir()
    if (reason := _claim_directory(place)) is not None:
        raise UsageError(f"cannot create a private directory: {reason}", hint=f"run `rm -r {place}`")
    return place


def choose_writable(root: Path, name: str) -> Path:
    """Return `root` if only this user can write to it, or else the subdirectory `name` of a private directory.

    Raises UsageError under the same conditions as `runtime_dir`.
    """
    if os.access(_find_nearest(root), os.W_OK | os.X_OK) and ownership.describe_path_exposure(root) is None:
        return root
    return _choose_private_directory([_name_frozen_dir(), *_list_temporary()], 0) / name


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


def _choose_private_directory(places: Sequence[Path], socket_path_bytes: int) -> Path:
    """Return the first of `places` that is private or can be made private. Raises UsageError if there is none."""
    reasons = list[str]()
    for place in places:
        if (reason := _claim_directory(place, socket_path_bytes)) is None:
            return place
        reasons.append(reason)
    raise UsageError(
        ["cannot create a private directory for sockets:", *reasons],
        hint="set XDG_RUNTIME_DIR to a directory that only you can write to",
    )


def _claim_directory(place: Path, socket_path_bytes: int = 0) -> str | None:
    """Create `place` as a private directory if it is missing. Return why it cannot be private, or None."""
    if socket_path_bytes and len(os.fsencode(place)) + socket_path_bytes > MAX_SOCKET_PATH_BYTES:
        return f"{place} is too long for a Unix socket path"
    if (reason := ownership.describe_path_exposure(place.parent)) is not None:
        return reason
    nearest = _find_nearest(place.parent)
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest} is not writable"
    return ownership.ensure_private_directory(place)


def _find_nearest(place: Path) -> Path:
    """Return `place` if it exists, or else its nearest parent that exists."""
    return next(one for one in (place, *place.parents) if os.path.exists(one))  # noqa: PTH110 - never raises
