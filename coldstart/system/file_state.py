"""Detect changes of files and directories with stat(2), without reading them, and cache the results of reading files.

The state of a directory has the identity, owner and mode of each entry, and the size and times of each file, including
ctime, which a process cannot set. States are recorded in the state directory, so a cache from another machine has no
records.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from coldstart.artifacts import canonical, files, ownership
from coldstart.system import paths

RACY_S = 2.0
"""A file younger than this, in seconds, may change without a change of its state: file system clocks are coarse."""
_FILES = 512
_Content = TypeVar("_Content")


class FileState(NamedTuple):
    """State of a file: size in bytes, modification and status-change times in nanoseconds, and inode."""

    size: int
    modified_ns: int
    changed_ns: int
    inode: int


def read_state(path: str | Path) -> FileState:
    """Return the state of a file. Raises OSError."""
    status = os.stat(path)  # noqa: PTH116 - of thousands of files at every start
    return FileState(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def find_state(path: str | Path) -> FileState | None:
    """Return the state of a file, or None if it cannot be read."""
    try:
        return read_state(path)
    except OSError:
        return None


def cache_by_state(read: Callable[[Path], _Content]) -> Callable[[Path], _Content]:
    """Decorate a function that reads a file, so that it reads the file again only after a change.

    Callers must not modify the results of the function.
    """

    @functools.lru_cache(maxsize=_FILES)
    def read_once(path: Path, state: FileState) -> _Content:
        return read(path)

    @functools.wraps(read)
    def call(path: Path) -> _Content:
        state = read_state(path)
        is_settled = time.time() - state.changed_ns / 1e9 > RACY_S
        return read_once(path, state) if is_settled else read(path)

    return call


def locate_record(kind: str, place: Path) -> Path:
    """Return the path of the record of type `kind` about the resolved path `place`."""
    where = hashlib.sha256(os.fsencode(os.path.realpath(place))).hexdigest()[:16]
    return paths.state_dir() / kind / f"{place.name}.{where}"


def record_directory(kind: str, place: Path, made_by: str) -> None:
    """Record the state of each entry of `place` by its relative path, and the creator `made_by`. Raises OSError."""
    document = {
        "made_by": made_by,
        "entries": {name: _fingerprint_entry(status) for name, status in _walk_entries(place)},
    }
    files.create_private_directory(locate_record(kind, place).parent)
    files.write_atomic(locate_record(kind, place), json.dumps(document).encode(), mode=0o600)


def read_record(kind: str, place: Path, made_by: str) -> Mapping[str, Sequence[int]]:
    """Return the recorded states of the entries of `place`, or none if `made_by` has not recorded any."""
    try:
        known = canonical.read_json(locate_record(kind, place))
        return dict(known["entries"]) if known["made_by"] == made_by else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def find_change(stamps: Mapping[str, Sequence[int]], place: Path, participle: str) -> str | None:
    """Describe the first entry of `place` that has changed since `stamps` were taken, or that other users can write to.

    Return None if there is none. `participle` is what was done to `place` at that time, such as "created", for the message.
    """
    present = dict(_walk_entries(place))
    for name, stamp in stamps.items():
        if name not in present:
            return f"{place / name} was removed"
        if _fingerprint_entry(present[name]) != list(stamp):
            return f"{place / name} has changed since it was {participle}"
    for name, entry in present.items():
        if (reason := ownership.describe_exposure(entry)) is not None:
            return f"{place / name} {reason}"
    return None


def _walk_entries(place: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the relative path and stat result of `place` (as ".") and of every entry below it. Links are not followed."""
    yield ".", place.lstat()
    pending = [""]
    while pending:
        below = pending.pop()
        with os.scandir(place / below) as listing:
            for entry in listing:
                yield below + entry.name, entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    pending.append(f"{below}{entry.name}/")


def _fingerprint_entry(status: os.stat_result) -> list[int]:
    identity = [status.st_dev, status.st_ino, status.st_uid, status.st_mode]
    if stat.S_ISDIR(status.st_mode):
        return identity  # a directory's size and times change when an entry is added
    return [*identity, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
