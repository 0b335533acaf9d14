"""States of files and directories from stat(2), by which a change is noticed without reading them; caches of what was read.

The state of a directory has the identity, owner and mode of each entry, and size and times of each file, including ctime, which
a process cannot set. Such states are records in the state directory, one per place, so a cache from another machine has none.
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
"""Age in seconds up to which a file may change again and keep its state, because clocks of file systems are coarse."""
_FILES = 512
_Content = TypeVar("_Content")


class FileState(NamedTuple):
    """Size in bytes, times of the last changes of content and status in nanoseconds, and inode."""

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
    """Return a function that reads a file again only after it has changed; its results must not be modified."""

    @functools.lru_cache(maxsize=_FILES)
    def read_once(path: Path, state: FileState) -> _Content:
        return read(path)

    @functools.wraps(read)
    def call(path: Path) -> _Content:
        state = read_state(path)
        is_settled = time.time() - state.changed_ns / 1e9 > RACY_S
        return read_once(path, state) if is_settled else read(path)

    return call


def find_record(kind: str, place: Path) -> Path:
    """Return the path of the record for `place`, which depends on its resolved path."""
    where = hashlib.sha256(os.fsencode(os.path.realpath(place))).hexdigest()[:16]
    return paths.state_dir() / kind / f"{place.name}.{where}"


def record_directory(kind: str, place: Path, made_by: str) -> None:
    """Record what made `place` and the fingerprint of each entry by relative path, of itself as ".". Raises OSError."""
    document = {"made_by": made_by, "entries": {name: _stamp(status) for name, status in _entries(place)}}
    files.create_private_directory(find_record(kind, place).parent)
    files.write_atomic(find_record(kind, place), json.dumps(document).encode(), mode=0o600)


def read_record(kind: str, place: Path, made_by: str) -> Mapping[str, Sequence[int]]:
    """Return the fingerprints that `write` recorded, {} if there are none of what was made so."""
    try:
        known = canonical.read_json(find_record(kind, place))
        return dict(known["entries"]) if known["made_by"] == made_by else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def find_change(stamped: Mapping[str, Sequence[int]], place: Path, made: str) -> str | None:
    """Return the first entry that changed since `place` was `made`, or that other users can write; None if there is none."""
    present = dict(_entries(place))
    for name, stamp in stamped.items():
        if name not in present:
            return f"{place / name} was removed"
        if _stamp(present[name]) != list(stamp):
            return f"{place / name} has changed since it was {made}"
    for name, entry in present.items():
        if (reason := ownership.describe_exposure(entry)) is not None:
            return f"{place / name} {reason}"
    return None


def _entries(place: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (relative path, stat) of every entry of `place`, itself as "."; links are not followed."""
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
    # A directory's size and times change when an entry is added.
    return (
        identity
        if stat.S_ISDIR(status.st_mode)
        else [*identity, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    )
