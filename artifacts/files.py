"""Durable file writes, file locks, and directories that belong to one process.

A file gets its final name once its bytes are on disk (write, fsync, rename, fsync). A directory is in use while its owner or
a fork of it holds the lock in it. The kernel releases the lock when the last of them exits, so reused PIDs and clock changes
do not matter.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from coldstart.artifacts.errors import NoLocksError, NotRegularError, TooLargeError, translate_os_errors
from coldstart.artifacts.limits import LIMITS

# Errors of flock(2) on file systems that do not support it.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
# Descriptors of this process, as the shell passes them for `<(...)`. The user chose to pass a pipe.
_OPEN_ALREADY = re.compile(r"/dev/(stdin|fd/\d+)|/proc/(self|\d+)/fd/\d+")
# Lock file with the PID of the owner of its directory, and the lock of all owned directories below one base.
_LOCK, _GATE = "lock", ".scratch.lock"
_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def sync_directory(directory: Path) -> None:
    """Flush the entries of `directory` to disk."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_existing_file(argument: str) -> bool:
    """Return whether a command-line argument is the path of an existing file; False if it cannot be a path."""
    try:
        return Path(argument).is_file()
    except (OSError, ValueError):  # too long, or not permitted
        return False


def create_private_directory(directory: Path) -> None:
    """Create a directory and its missing parents with mode 0700, independent of the umask."""
    for path in reversed([directory, *directory.parents]):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Atomically replace the contents of `path` with `data`. Raises NoSpaceError or ReadOnlyStoreError."""
    with translate_os_errors(f"writing {path}"), open_replacement(path, mode=mode) as file:
        file.write(data)


@contextmanager
def open_replacement(path: Path, *, mode: int = 0o644, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block ends without an exception. Raises OSError.

    If `durable` is false, the call does not wait for the disk, so the file may be lost or empty after a power failure.
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


def create_file(path: Path, mode: int) -> BinaryIO:
    """Create a file and open it for writing, with the mode `mode` minus the umask. Raises FileExistsError."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb")


def open_regular(path: str | Path) -> BufferedReader:
    """Open a regular file for reading. Raises the errors of `open_descriptor`."""
    return os.fdopen(open_descriptor(path), "rb")


def open_descriptor(path: str | Path, *, follow: bool = True) -> int:
    """Open a regular file for reading and return its descriptor. Never wait for a pipe's writer, and never open a device.

    With `follow=False`, a symbolic link raises OSError (ELOOP). A path such as /dev/stdin or /dev/fd/63 may be a pipe.

    Raises NotRegularError for a file that is not regular, and OSError.
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
        is_passed_pipe = kind != stat.S_IFDIR and _OPEN_ALREADY.fullmatch(os.fspath(path))
        if kind != stat.S_IFREG and not is_passed_pipe:
            raise NotRegularError(f"{path} is {_KINDS.get(kind, 'a device')}, not a regular file")
        os.set_blocking(handle, True)
        return handle
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: str | Path, max_bytes: int = LIMITS.json_section_bytes) -> bytes:
    """Read a regular file of at most `max_bytes`. Raises TooLargeError if it is larger, and the errors of `open_regular`."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise TooLargeError(f"{path} exceeds the limit of {max_bytes} bytes")
    return data


def read_text(path: str | Path) -> str:
    """Read a small UTF-8 file. Raises UnicodeDecodeError and the errors of `read_regular`."""
    return read_regular(path).decode()


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive advisory lock on `path` during the block. The kernel releases it when the process exits."""
    with translate_os_errors(f"locking {path.name}"):
        handle = _open_lock(path)
    try:
        _flock(handle, fcntl.LOCK_EX, path)
        yield
    finally:
        os.close(handle)


def try_lock(path: Path) -> int | None:
    """Lock `path` and return a descriptor that holds the lock until it is closed, or None if another process holds the lock."""
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
    """Open a lock file with mode 0600, because a user who can read it could lock it and block this user."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _flock(handle: int, operation: int, path: Path) -> None:
    try:
        fcntl.flock(handle, operation)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise NoLocksError(
                f"the file system of {path.parent} does not support file locks: {error.strerror}"
            ) from error
        raise


@contextmanager
def create_owned_directory(
    base: Path, prefix: str = "", *, gate: Path | None = None, patience_s: float = 0.0
) -> Iterator[Path]:
    """Yield a new private directory below `base` that contains only its lock. First remove dead directories with `prefix`.

    Args:
        base: Parent directory.
        prefix: Prefix of the directory's name.
        gate: Lock of all such directories below `base`, whatever their prefix. The default is a file in `base`.
        patience_s: Time in seconds that the removal waits for child processes that are still writing.

    Raises:
        OSError: The directory cannot be created.
    """
    # The lock ensures that no process removes a new directory before its owner holds the lock in it.
    with hold_lock(gate or base / _GATE):
        for dead in list_dead_directories(base, prefix, is_locked=True):
            _remove(dead, patience_s)
        own = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        held = try_lock(own / _LOCK)
        if held is not None:
            os.write(held, str(os.getpid()).encode())
    try:
        yield own
    finally:
        _remove(own, patience_s)
        if held is not None:
            os.close(held)


def remove_dead_below(base: Path, prefix: str = "") -> list[str]:
    """Remove the dead directories below `base` that have this prefix, and return the PIDs of live owners. Raises OSError."""
    owners, dead = list[str](), list_dead_directories(base, prefix)
    for one in dead:
        _remove(one, 0.0)
    for lock in base.glob(f"{prefix}*/{_LOCK}"):
        # The owner may be removing its directory, or may not have written its PID yet.
        with suppress(OSError, ValueError):
            owners += [] if lock.parent in dead else [read_text(lock)]
    return owners


def list_dead_directories(base: Path, prefix: str = "", *, is_locked: bool = False) -> list[Path]:
    """Return the directories below `base` that have this prefix and whose owner is dead.

    `is_locked` states that the caller holds the gate. Raises OSError.
    """
    dead = list[Path]()
    if not base.is_dir():
        return dead
    with nullcontext() if is_locked else hold_lock(base / _GATE):
        for directory in sorted(base.glob(f"{prefix}*")):
            is_own = directory.is_dir() and not directory.is_symlink()
            with suppress(OSError):  # the owner may be removing it, or may be another user
                if is_own and (lock := try_lock(directory / _LOCK)) is not None:
                    os.close(lock)
                    dead.append(directory)
    return dead


def _remove(directory: Path, patience_s: float) -> None:
    """Remove the directory, retrying while child processes still write to it. The next process removes what is left."""
    deadline_s = time.monotonic() + patience_s
    shutil.rmtree(directory, ignore_errors=True)
    while directory.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
        shutil.rmtree(directory, ignore_errors=True)
