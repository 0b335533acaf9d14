"""Whether nobody but this user and root can put something in a place: sshd's StrictModes, for every component of a path.

A directory that others may write to is a directory that others may replace what is below it of. A sticky one of root's (/tmp)
is none: there only the owner of a name may take it away. The path is judged as it is resolved, so a link is judged by where it
leads and by whoever could turn it elsewhere.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from coldstart.artifacts import files

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def fault(path: Path) -> str | None:
    """Why what stands at `path` could be another user's, or None; of a path that is not there, its nearest directory's."""
    resolved = Path(os.path.realpath(path))
    for place in (resolved, *resolved.parents):
        try:
            status = place.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{place} cannot be looked at: {error.strerror}"
        if (reason := entry_fault(status)) is not None:
            return f"{place} {reason}"
    return None


def entry_fault(status: os.stat_result) -> str | None:
    """What is wrong with one file or directory: its owner, or who may write to it."""
    if status.st_uid not in (0, os.getuid()):
        return f"belongs to user {status.st_uid}"
    sticky = status.st_uid == 0 and stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & _OTHERS and not sticky and not stat.S_ISLNK(status.st_mode):
        return f"may be written by others (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def private(path: Path) -> str | None:
    """Why `path` is no directory of this user's with mode 0700 in a place that is nobody else's; made if missing."""
    try:
        files.make_private(path)
        status = path.lstat()
    except OSError as error:
        return f"{path} cannot be made: {error.strerror}"
    if not stat.S_ISDIR(status.st_mode):
        return f"{path} is no directory"
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        return f"{path} has owner {status.st_uid} and mode {stat.S_IMODE(status.st_mode):04o}, wanted {os.getuid()} and 0700"
    return fault(path)
