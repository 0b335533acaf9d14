"""A work directory of one run: gone with it, and where the run was killed, with the next one that begins.

It is alive while its lock is held; the kernel drops that with the process.
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
_PATIENCE_S = 10.0


@contextmanager
def workspace(root: Path) -> Iterator[Path]:
    """A directory below `root` that holds its lock and nothing else; those of killed runs, for whatever key, are removed.

    Raises OSError.
    """
    root.mkdir(parents=True, exist_ok=True)
    # One at a time, so that none removes another's directory before that one's own lock is held.
    with files.locked(root.with_suffix(".lock")):
        for stale in filter(Path.is_dir, root.iterdir()):
            _remove_abandoned(stale)
        own = Path(tempfile.mkdtemp(dir=root))
        held = files.try_lock(own / _LOCK)
    try:
        yield own
    finally:
        _remove(own)
        if held is not None:
            os.close(held)


def _remove_abandoned(directory: Path) -> None:
    lock = files.try_lock(directory / _LOCK)
    if lock is not None:
        _remove(directory)
        os.close(lock)


def _remove(directory: Path) -> None:
    """What the run has started may still be ending, and writing: again then. What stays after that the next run removes."""
    deadline_s = time.monotonic() + _PATIENCE_S
    shutil.rmtree(directory, ignore_errors=True)
    while directory.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
        shutil.rmtree(directory, ignore_errors=True)
