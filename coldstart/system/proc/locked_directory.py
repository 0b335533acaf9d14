"""A directory of one process: gone with it, and where it was killed, with the next one of its kind.

It is alive while its lock is held, by the process or by what it forked; the kernel drops the lock with the last of them,
whatever pids or clocks say.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coldstart.artifacts import files

_LOCK = "lock"
"""Locked by the process whose pid it holds, and by what that has forked."""


@contextmanager
def owned(base: Path, gate: Path, prefix: str = "", *, patience_s: float = 0.0) -> Iterator[Path]:
    """A directory `prefix`... below `base`, private, that holds its lock and nothing else; dead ones of that name are removed.

    `gate` is the lock of all of them; `patience_s`: how long to wait for what the process has started and is still writing.
    Raises OSError.
    """
    # One at a time, so that none removes another's directory before that one's own lock is held.
    with files.locked(gate):
        remove_dead(base, prefix, patience_s)
        own = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        held = files.try_lock(own / _LOCK)
        if held is not None:
            os.write(held, str(os.getpid()).encode())
    try:
        yield own
    finally:
        _remove(own, patience_s)
        if held is not None:
            os.close(held)


def remove_dead(base: Path, prefix: str, patience_s: float = 0.0) -> list[str]:
    """Remove those of processes that have gone, with the gate held; the pids of those who live."""
    found = filter(Path.is_dir, base.glob(f"{prefix}*"))
    return [_owner(one) for one in found if not _removed_if_dead(one, patience_s)]


def _removed_if_dead(directory: Path, patience_s: float) -> bool:
    lock = files.try_lock(directory / _LOCK)
    if lock is None:
        return False
    _remove(directory, patience_s)
    os.close(lock)
    return True


def _remove(directory: Path, patience_s: float) -> None:
    """What the process has started may still be ending, and writing: again then. What stays after that the next one removes."""
    deadline_s = time.monotonic() + patience_s
    shutil.rmtree(directory, ignore_errors=True)
    while directory.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
        shutil.rmtree(directory, ignore_errors=True)


def _owner(directory: Path) -> str:
    try:
        return (directory / _LOCK).read_text()
    except OSError:
        return ""  # it has just begun, or has just gone
