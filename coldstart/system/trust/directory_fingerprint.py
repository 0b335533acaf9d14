"""What a directory holds, as stat(2) knows it: whether something in it was changed, added by others or taken away since.

Of a file its identity, owner, mode, size and times, ctime among them, which nobody can set; of a directory all but size and
times. Stamps are kept in the state directory, one record for each place: a cache that comes from elsewhere brings none.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from coldstart.system import paths
from coldstart.system.trust import ownership


def record(kind: str, place: Path) -> Path:
    """Where what is known of `place` is kept, by its resolved path."""
    where = hashlib.sha256(os.fsencode(os.path.realpath(place))).hexdigest()[:16]
    return paths.state_dir() / kind / f"{place.name}.{where}"


def of(place: Path) -> dict[str, list[int]]:
    """A stamp for everything in `place`, by its path below it, and for itself as ".". Raises OSError."""
    return {name: _stamp(status) for name, status in _entries(place)}


def change(stamped: Mapping[str, Sequence[int]], place: Path, made: str) -> str | None:
    """What of `stamped` is gone or has changed since `place` was `made`, or what others could write to; None for nothing."""
    present = dict(_entries(place))
    for name, stamp in stamped.items():
        if name not in present:
            return f"{place / name} is gone"
        if _stamp(present[name]) != list(stamp):
            return f"{place / name} has changed since it was {made}"
    for name, entry in present.items():
        if (reason := ownership.entry_fault(entry)) is not None:
            return f"{place / name} {reason}"
    return None


def _entries(place: Path) -> Iterator[tuple[str, os.stat_result]]:
    """(path below `place`, stat) of everything in it, itself as "."; links are not followed."""
    yield ".", place.lstat()
    pending = [""]
    while pending:
        below = pending.pop()
        with os.scandir(place / below) as listing:
            for entry in listing:
                yield below + entry.name, entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    pending.append(f"{below}{entry.name}/")


def _stamp(status: os.stat_result) -> list[int]:
    identity = [status.st_dev, status.st_ino, status.st_uid, status.st_mode]
    # A directory's size and times change with what is added.
    return (
        identity
        if stat.S_ISDIR(status.st_mode)
        else [*identity, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    )
