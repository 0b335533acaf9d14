"""Check that only this user and root can write to a path, as sshd's StrictModes does for every component of a path.

If other users can write to a directory, they can replace everything below it. A sticky directory owned by root, such as
/tmp, is safe: only the owner of an entry can remove it. The resolved path is checked: for a link, its target and its own
directory. Keys are checked up to the state directory. Directories above it are the administrator's responsibility: a
Kubernetes volume, for example, is writable by every user (mode 0777).
"""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path
from typing import NamedTuple

from coldstart.artifacts import files
from coldstart.artifacts.errors import ExposedKeyError

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class _Exposure(NamedTuple):
    """Path that other users own or can write to, with its stat(2) result and the reason."""

    path: Path
    status: os.stat_result
    reason: str


def describe_exposure(status: os.stat_result, *, allow_sticky: bool = True) -> str | None:
    """Return the reason why other users could change a file with this stat result (its owner or mode), or None.

    If `allow_sticky` is set, a sticky directory owned by root, such as /tmp, is allowed: only the owner of an entry can
    remove it.
    """
    if status.st_uid not in (0, os.getuid()):
        return f"belongs to another user (UID {status.st_uid})"
    sticky = status.st_uid == 0 and stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & _OTHERS and not (sticky and allow_sticky) and not stat.S_ISLNK(status.st_mode):
        return f"is writable by other users (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def describe_path_exposure(path: Path) -> str | None:
    """Return the reason why other users could change or replace `path`, or None. If it is missing, check its parents."""
    try:
        exposure = _find_exposure(path)
    except OSError as error:
        return f"cannot inspect {error.filename}: {error.strerror}"
    return None if exposure is None else f"{exposure.path} {exposure.reason}"


def ensure_private_directory(path: Path) -> str | None:
    """Create `path` with mode 0700 if it is missing.

    Return the reason if it is not a private directory of this user, else None.
    """
    try:
        files.create_private_directory(path)
        status = path.lstat()
    except OSError as error:
        return f"cannot create {path}: {error.strerror}"
    if not stat.S_ISDIR(status.st_mode):
        return f"{path} is not a directory"
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        return f"{path} has owner {status.st_uid} and mode {stat.S_IMODE(status.st_mode):04o}, expected {os.getuid()} and 0700"
    return describe_path_exposure(path)


def require_unexposed(path: Path, state_dir: Path) -> None:
    """Check that no other user can change a key file or a directory of keys in `state_dir`. A missing path is accepted.

    Raises ExposedKeyError if another user owns or can write to it, or to a directory between it and the state directory.
    """
    top = Path(os.path.realpath(state_dir))
    # A user who can write to the directory of a link can replace the link.
    if (found := _find_exposure(path, top) or _find_exposure(path.parent, top)) is None:
        return
    name, user = shlex.quote(str(found.path)), os.getuid()
    repair = f"chmod go-w {name}"
    if found.status.st_uid not in (0, user):
        repair = f"{'sudo ' if user else ''}chown {user} {name}"
    raise ExposedKeyError(
        f"other users could change the trusted keys: {found.path} {found.reason}",
        hint=f"check the keys, then run `{repair}`",
    )


def _find_exposure(path: Path, top: Path | None = None) -> _Exposure | None:
    """Return the first exposed path among the resolved `path` and the directories above it, up to `top`. Raises OSError."""
    resolved = Path(os.path.realpath(path))
    for place in (resolved, *resolved.parents):
        if top is not None and place in top.parents:
            break
        try:
            status = place.lstat()
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            continue  # The caller that reads the path rejects it if it is a device, for example.
        is_above = top is None or (place != top and top not in place.parents)
        if (reason := describe_exposure(status, allow_sticky=is_above)) is not None:
            return _Exposure(place, status, reason)
    return None
