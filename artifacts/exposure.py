"""Refuse keys, and directories of keys, that another user owns or can write to: who can replace a trusted key can run code.

The check covers a key and every directory up to the state directory. Directories above it are the machine's own business: a
volume of Kubernetes is writable by everybody (mode 0777). A link is judged by the file that it leads to, and by the directories
above that file.
"""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from coldstart.artifacts.errors import ExposedKeyError

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


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


def require_unexposed(path: Path, state_dir: Path) -> None:
    """Check a key or a directory of keys in `state_dir`; nothing is checked that does not exist.

    Raises ExposedKeyError if another user owns or can write to it, or to a directory from the state directory to it.
    """
    top = Path(os.path.realpath(state_dir))
    _check(Path(os.path.realpath(path)), top)
    # Who can write to the directory that holds a link can replace the link.
    _check(Path(os.path.realpath(path.parent)), top)


def _check(place: Path, top: Path) -> None:
    for one in (place, *place.parents):
        if one in top.parents:
            return
        try:
            status = one.stat()
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            continue  # a device, for example: its reader refuses it
        is_outside = one != top and top not in one.parents
        if (reason := entry_fault(status, allow_sticky=is_outside)) is not None:
            raise ExposedKeyError(
                f"the trusted keys are exposed: {one} {reason}",
                hint=f"check the keys, then: {_format_repair(one, status)}",
            )


def _format_repair(place: Path, status: os.stat_result) -> str:
    name, user = shlex.quote(str(place)), os.getuid()
    if status.st_uid not in (0, user):
        return f"{'sudo ' if user else ''}chown {user} {name}"
    return f"chmod go-w {name}"
