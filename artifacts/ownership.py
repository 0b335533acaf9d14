"""Check that only this user and root can write to a place: sshd's StrictModes for every component of a path.

If other users can write to a directory, they can replace everything below it. A sticky directory of root (/tmp) is safe:
only the owner of a name can remove it. The resolved path is checked, so a link is judged by its target and its own directory.
Keys are checked up to the state directory. Directories above it are the machine's own business: a volume of Kubernetes is
writable by everybody (mode 0777).
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


class _Fault(NamedTuple):
    place: Path
    status: os.stat_result
    reason: str


def entry_fault(status: os.stat_result, *, allow_sticky: bool = True) -> str | None:
    """Return the fault of one file or directory: its owner, or write access of other users.

    With `allow_sticky`, a sticky directory of root (/tmp) has none, because only the owner of a name can remove it.
    """
    if status.st_uid not in (0, os.getuid()):
        return f"belongs to user {status.st_uid}"
    sticky = status.st_uid == 0 and stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & _OTHERS and not (sticky and allow_sticky) and not stat.S_ISLNK(status.st_mode):
        return f"is writable by other users (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def fault(path: Path) -> str | None:
    """Return why `path` could belong to another user, or None. If the path does not exist, its parents are checked."""
    try:
        found = _find(path)
    except OSError as error:
        return f"cannot inspect {error.filename}: {error.strerror}"
    return None if found is None else f"{found.place} {found.reason}"


def private(path: Path) -> str | None:
    """Create `path` as a private directory if it is missing. Return why it is not private (this user's, mode 0700), or None."""
    try:
        files.make_private(path)
        status = path.lstat()
    except OSError as error:
        return f"cannot create {path}: {error.strerror}"
    if not stat.S_ISDIR(status.st_mode):
        return f"{path} is not a directory"
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        return f"{path} has owner {status.st_uid} and mode {stat.S_IMODE(status.st_mode):04o}, expected {os.getuid()} and 0700"
    return fault(path)


def require_unexposed(path: Path, state_dir: Path) -> None:
    """Check a key or a directory of keys in `state_dir`; nothing is checked that does not exist.

    Raises ExposedKeyError if another user owns or can write to it, or to a directory from the state directory to it.
    """
    top = Path(os.path.realpath(state_dir))
    # Who can write to the directory that holds a link can replace the link.
    if (found := _find(path, top) or _find(path.parent, top)) is None:
        return
    name, user = shlex.quote(str(found.place)), os.getuid()
    repair = f"chmod go-w {name}"
    if found.status.st_uid not in (0, user):
        repair = f"{'sudo ' if user else ''}chown {user} {name}"
    raise ExposedKeyError(
        f"the trusted keys are exposed: {found.place} {found.reason}",
        hint=f"check the keys, then: {repair}",
    )


def _find(path: Path, top: Path | None = None) -> _Fault | None:
    """Return the first place with a fault: the resolved path, or a directory above it, up to `top`. Raises OSError."""
    resolved = Path(os.path.realpath(path))
    for place in (resolved, *resolved.parents):
        if top is not None and place in top.parents:
            break
        try:
            status = place.lstat()
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            continue  # a device, for example: its reader refuses it
        is_above = top is None or (place != top and top not in place.parents)
        if (reason := entry_fault(status, allow_sticky=is_above)) is not None:
            return _Fault(place, status, reason)
    return None
