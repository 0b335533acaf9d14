"""Durable file primitives.

A name appears only once its bytes are on disk (write, fsync, rename, fsync directory).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from coldstart.artifacts.errors import TooLarge, named_os_errors


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace `path` by `data`; a reader sees the old or the new bytes. Raises NoSpace or ReadOnlyStore."""
    with named_os_errors(f"writing {path.name}"), replacing(path, mode=mode) as file:
        file.write(data)


@contextmanager
def replacing(path: Path, *, mode: int = 0o644, durable: bool = True) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends; nothing happens if it raises. Raises OSError.

    What is not `durable` may be lost or empty after a power failure, and costs no wait for the disk.
    """
    partial = path.with_name(f".{path.name}.{uuid4().hex}.partial")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
    if durable:
        sync_directory(path.parent)


def read_capped(path: Path, cap: int) -> bytes:
    """The bytes of a small file. Raises TooLarge past `cap`, OSError if it cannot be read."""
    with path.open("rb") as file:
        data = file.read(cap + 1)
    if len(data) > cap:
        raise TooLarge(f"{path.name} is larger than {cap} bytes")
    return data


@contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold an advisory lock on `path`. The kernel drops it when the holder dies, so no lock is ever stale."""
    with named_os_errors(f"locking {path.name}"):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def try_lock(path: Path) -> int | None:
    """A handle that holds the exclusive lock on `path` until it is closed, or None if somebody holds it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def sync_file(file: BinaryIO) -> None:
    """Make what was flushed to `file` durable."""
    os.fsync(file.fileno())
