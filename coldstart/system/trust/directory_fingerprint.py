"""Fingerprint of a directory from stat(2), which shows whether an entry was changed, removed or made writable for others.

The fingerprint of a file contains its identity, owner, mode, size and times, including ctime, which a process cannot set. That
of a directory omits size and times. Fingerprints are stored in the state directory, one record per place, so a cache from
another machine has none.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from coldstart.artifacts import canonical, files, ownership
from coldstart.system import paths


def record(kind: str, place: Path) -> Path:
    """Return the path of the record for `place`, which depends on its resolved path."""
    where = hashlib.sha256(os.fsencode(os.path.realpath(place))).hexdigest()[:16]
    return paths.state_dir() / kind / f"{place.name}.{where}"


def write(kind: str, place: Path, made_by: str) -> None:
    """Record what made `place` and the fingerprint of each entry by relative path, of itself as ".". Raises OSError."""
    document = {"made_by": made_by, "entries": {name: _stamp(status) for name, status in _entries(place)}}
    files.make_private(record(kind, place).parent)
    files.write_atomic(record(kind, place), json.dumps(document).encode(), mode=0o600)


def read(kind: str, place: Path, made_by: str) -> Mapping[str, Sequence[int]]:
    """Return the fingerprints that `write` recorded, {} if there are none of what was made so."""
    try:
        known = canonical.read(record(kind, place))
        return dict(known["entries"]) if known["made_by"] == made_by else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def change(stamped: Mapping[str, Sequence[int]], place: Path, made: str) -> str | None:
    """Return the first entry that changed since `place` was `made`, or that other users can write; None if there is none."""
    present = dict(_entries(place))
    for name, stamp in stamped.items():
        if name not in present:
            return f"{place / name} was removed"
        if _stamp(present[name]) != list(stamp):
            return f"{place / name} has changed since it was {made}"
    for name, entry in present.items():
        if (reason := ownership.entry_fault(entry)) is not None:
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
