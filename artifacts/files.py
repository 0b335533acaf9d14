"""Durable file primitives.

A name appears only once its bytes are on disk (write, fsync, rename, fsync directory).
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from coldstart.artifacts.errors import NoLocksError, NotRegularError, TooLargeError, named_os_errors
from coldstart.artifacts.limits import LIMITS

# Errors of file systems without locks.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
# Names of files that this process has open, as the shell gives them for `<(...)`: the user chose the pipe.
_OPEN_ALREADY = re.compile(r"/dev/(stdin|fd/\d+)|/proc/(self|\d+)/fd/\d+")
_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def sync_directory(directory: Path) -> None:
    """Write the names in `directory` to the disk."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_file(word: str) -> bool:
    """Return whether a word that a user typed is the path of a file; False also where it can be no path."""
    try:
        return Path(word).is_file()
    except (OSError, ValueError):  # too long, or not permitted
        return False


def make_private(directory: Path) -> None:
    """Create a directory and its missing parents with mode 0700, independent of the umask."""
    for place in reversed([directory, *directory.parents]):
        if not place.exists():
            place.mkdir(mode=0o700, exist_ok=True)


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace `path` by `data`; a reader sees the old or the new bytes. Raises NoSpaceError or ReadOnlyStoreError."""
    with named_os_errors(f"writing {path.name}"), replacing(path, mode=mode) as file:
        file.write(data)


@contextmanager
def replacing(path: Path, *, mode: int = 0o644, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block ends without an exception. Raises OSError.

    Without `durable` the file may be lost or empty after a power failure, and the call does not wait for the disk.
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


def create(path: Path, mode: int) -> BinaryIO:
    """Create a file for writing, with `mode` less the umask. Raises FileExistsError."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb")


def open_regular(path: str | Path) -> BufferedReader:
    """Open a file as `open_descriptor` does."""
    return os.fdopen(open_descriptor(path), "rb")


def open_descriptor(path: str | Path, *, follow: bool = True) -> int:
    """Open a regular file for reading, without a wait for the writer of a pipe and without use of a device.

    Without `follow`, a symbolic link is an OSError (ELOOP). A name such as /dev/stdin or /dev/fd/63 may be a pipe.

    Raises NotRegularError for anything but a regular file, and OSError.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    try:
        handle = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENODEV):
            raise NotRegularError(f"{path} is a socket or a device, not a regular file") from error
        raise
    try:
        kind = stat.S_IFMT(os.fstat(handle).st_mode)
        is_chosen = kind != stat.S_IFDIR and _OPEN_ALREADY.fullmatch(os.fspath(path))
        if kind != stat.S_IFREG and not is_chosen:
            raise NotRegularError(f"{path} is {_KINDS.get(kind, 'a device')}, not a regular file")
        os.set_blocking(handle, True)
        return handle
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: str | Path, cap: int = LIMITS.json_section) -> bytes:
    """Return the bytes of a small file. Raises TooLargeError above `cap`, and as `open_regular`."""
    with open_regular(path) as file:
        data = file.read(cap + 1)
    if len(data) > cap:
        raise TooLargeError(f"{path} is larger than {cap} bytes")
    return data


def read_text(path: str | Path) -> str:
    """Return the text of a small file in UTF-8. Raises UnicodeDecodeError, and as `read_regular`."""
    return read_regular(path).decode()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock on `path`. The kernel drops it when the process dies, so locks cannot be stale."""
    with named_os_errors(f"locking {path.name}"):
        handle = _open_lock(path)
    try:
        _flock(handle, fcntl.LOCK_EX, path)
        yield
    finally:
        os.close(handle)


def try_lock(path: Path) -> int | None:
    """Return a handle with the exclusive lock on `path` until it is closed, or None if another process has the lock."""
    handle = _open_lock(path)
    try:
        _flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, path)
    except BlockingIOError:
        os.close(handle)
        return None
    except BaseException:
        os.close(handle)
        raise
    return handle


def _open_lock(path: Path) -> int:
    """Open a lock file. Another user who could read it could lock it, and this user would wait forever."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _flock(handle: int, operation: int, path: Path) -> None:
    try:
        fcntl.flock(handle, operation)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise NoLocksError(
                f"{path.parent} is on a file system without locks: {error.strerror}"
            ) from error
        raise


def create_once(path: Path, data: bytes, mode: int) -> None:
    """Create `path` with `data` unless it exists; of several writers one wins, and its file is complete.

    Raises NoSpaceError, ReadOnlyStoreError, NoLocksError.
    """
    with locked(path.with_name(f".{path.name}.lock")):
        if not os.path.lexists(path):
            write_atomic(path, data, mode=mode)
