"""Check that only this user and root can write to a place: sshd's StrictModes for every component of a path.

If other users can write to a directory, they can replace everything below it. A sticky directory of root (/tmp) is safe:
only the owner of a name can remove it. The resolved path is checked, so a link is judged by its target and its own directory.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from coldstart.artifacts import files
from coldstart.artifacts.exposure import entry_fault


def fault(path: Path) -> str | None:
    """Return why `path` could belong to another user, or None. If the path does not exist, its parents are checked."""
    resolved = Path(os.path.realpath(path))
    for place in (resolved, *resolved.parents):
        try:
            status = place.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"cannot inspect {place}: {error.strerror}"
        if (reason := entry_fault(status)) is not None:
            return f"{place} {reason}"
    return None


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
