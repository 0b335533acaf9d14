"""Directories of one process that are removed when it exits or, if it is killed, by the next process of the same type.

A directory is in use while the process or one of its forks holds the lock in it. The kernel releases the lock when the
last of them exits, so reused PIDs and clock changes do not matter.

vLLM creates sockets and a rendezvous file in the temporary directory and does not remove them. So each server has its own
directory (`use_scratch_directory`), with a path that is short enough for sockets. If a server is killed, its supervisor
or the next server removes the directory.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from coldstart.artifacts import files
from coldstart.system import paths

SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
PREFIX, RECORDING, PROOF = "server-", "recording-", "proof-"
# Lock of all directories below one base, whatever their prefix.
_GATE = ".scratch.lock"
# Path of the longest socket below the base in bytes: vLLM's socket names are UUIDs.
_SOCKET_PATH_BYTES = len(f"/{PREFIX}12345678/") + 36
_PATIENCE_S = 10.0


@contextmanager
def private_directory(prefix: str) -> Iterator[Path]:
    """Yield a directory of this process that is removed after the block or, after a kill, by `remove_dead_directories`.

    Raises the errors of `use_scratch_directory`.
    """
    with create_owned_directory(_choose_base(), prefix) as own:
        yield own


@contextmanager
def use_scratch_directory() -> Iterator[Path]:
    """Use a new directory for temporary files and sockets of this process and its children. Remove it after the block.

    Raises:
        OSError: The directory cannot be created.
        UsageError: No private directory can be created.
    """
    with private_directory(PREFIX) as own:
        directory, names = tempfile.tempdir, ("TMPDIR", SOCKETS_VARIABLE)
        before = {name: os.environ[name] for name in names if name in os.environ}
        tempfile.tempdir = os.environ["TMPDIR"] = str(own)
        os.environ.setdefault(SOCKETS_VARIABLE, str(own))
        try:
            yield own
        finally:
            tempfile.tempdir = directory
            for name in names:
                os.environ.pop(name, None)
            os.environ.update(before)


def remove_dead_directories(ended: int | None = None) -> None:
    """Remove the directories of killed processes. First wait for the forks of the exited server with PID `ended`.

    Raises:
        OSError: The directory cannot be read.
        UsageError: No private directory can be created.
    """
    base, deadline_s = _choose_base(), time.monotonic() + _PATIENCE_S
    while True:
        with files.hold_lock(base / _GATE):
            owners = [owner for one in (PREFIX, RECORDING, PROOF) for owner in remove_dead(base, one)]
        if str(ended) not in owners or time.monotonic() > deadline_s:
            return
        time.sleep(0.05)


def _choose_base() -> Path:
    return paths.temporary_dir(_SOCKET_PATH_BYTES)


_LOCK = "lock"
"""Lock file with the PID of its owner. The owner and its forks hold the lock."""


@contextmanager
def create_owned_directory(base: Path, prefix: str = "", *, patience_s: float = 0.0) -> Iterator[Path]:
    """Yield a new private directory below `base` that contains only its lock. First remove dead directories with `prefix`.

    Args:
        base: Parent directory.
        prefix: Prefix of the directory's name.
        patience_s: Time in seconds that the removal waits for child processes that are still writing.

    Raises:
        OSError: The directory cannot be created.
    """
    # The lock ensures that no process removes a new directory before its owner holds the lock in it.
    with files.hold_lock(base / _GATE):
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


def remove_dead_below(base: Path, prefix: str = "") -> None:
    """Remove directories below `base` that have this prefix and whose process is dead. Raises OSError."""
    if base.is_dir():
        with files.hold_lock(base / _GATE):
            remove_dead(base, prefix)


def remove_dead(base: Path, prefix: str, patience_s: float = 0.0) -> list[str]:
    """Remove the directories of dead processes, and return the PIDs of live owners. The caller holds the lock of `base`."""
    owners = []
    for directory in filter(Path.is_dir, base.glob(f"{prefix}*")):
        # The owner may be removing its directory, or may not have written its PID yet.
        with suppress(FileNotFoundError, ValueError):
            if (lock := files.try_lock(directory / _LOCK)) is None:
                owners.append(files.read_text(directory / _LOCK))
            else:
                _remove(directory, patience_s)
                os.close(lock)
    return owners


def _remove(directory: Path, patience_s: float) -> None:
    """Remove the directory, retrying while child processes still write to it. The next process removes what is left."""
    deadline_s = time.monotonic() + patience_s
    shutil.rmtree(directory, ignore_errors=True)
    while directory.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
        shutil.rmtree(directory, ignore_errors=True)
