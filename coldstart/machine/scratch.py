"""A temporary directory of one server: private from birth, and gone with it, however it ends.

vLLM names sockets and a rendezvous file in the directory for temporary files and leaves them there. So a server has a directory
of its own. It is alive while its lock is held, by the server or by what it forked; the kernel drops the lock with the last of
them, whatever pids or clocks say, and a server's supervisor, or the next server, removes what is dead.
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
from coldstart.machine import paths

SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
PREFIX = "server-"
# A unix socket's path may have 107 bytes; vLLM's sockets are called by a UUID.
_LONGEST = 107 - 1 - 36
_LOCK = "lock"
"""Locked by the server whose pid it holds, and by what that has forked."""
_PATIENCE_S = 10.0


@contextmanager
def scratch() -> Iterator[Path]:
    """From here on this process and its children put temporary files and sockets in a directory that ends with the block.

    Raises OSError, and Usage where no private place can be had.
    """
    base = _base()
    with files.locked(base / "scratch.lock"):
        _remove_dead(base)
        own = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        held = files.try_lock(own / _LOCK)
        if held is not None:
            os.write(held, str(os.getpid()).encode())
    before = _use(own)
    try:
        yield own
    finally:
        _put_back(before)
        shutil.rmtree(own, ignore_errors=True)
        if held is not None:
            os.close(held)


def sweep(ended: int | None = None) -> None:
    """Remove the directories of servers that were killed; what the one whose pid was `ended` has forked may still be ending.

    Raises OSError, and Usage where no private place can be had.
    """
    base, deadline_s = _base(), time.monotonic() + _PATIENCE_S
    while True:
        with files.locked(base / "scratch.lock"):
            owners = _remove_dead(base)
        if str(ended) not in owners or time.monotonic() > deadline_s:
            return
        time.sleep(0.05)


def _remove_dead(base: Path) -> list[str]:
    """The pids of those whose directories are alive."""
    alive = [one for one in base.glob(f"{PREFIX}*") if one.is_dir() and not _removed_if_dead(one)]
    return [_owner(one) for one in alive]


def _use(own: Path) -> tuple[str | None, dict[str, str | None]]:
    """What was used before: tempfile's own directory, and the variables."""
    before = tempfile.tempdir, {name: os.environ.get(name) for name in ("TMPDIR", SOCKETS_VARIABLE)}
    tempfile.tempdir = os.environ["TMPDIR"] = str(own)
    os.environ.setdefault(SOCKETS_VARIABLE, str(own))
    return before


def _put_back(before: tuple[str | None, dict[str, str | None]]) -> None:
    tempfile.tempdir, variables = before
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _base() -> Path:
    wanted = paths.temporary_dir()
    fits = len(os.fsencode(wanted / f"{PREFIX}12345678")) <= _LONGEST
    return wanted if fits else paths.runtime_dir()


def _removed_if_dead(directory: Path) -> bool:
    lock = files.try_lock(directory / _LOCK)
    if lock is None:
        return False
    shutil.rmtree(directory, ignore_errors=True)
    os.close(lock)
    return True


def _owner(directory: Path) -> str:
    try:
        return (directory / _LOCK).read_text()
    except OSError:
        return ""  # it has just begun, or has just gone
