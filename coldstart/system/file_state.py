"""State of a file, by which a change is noticed without reading it, and a cache of what was read."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

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
