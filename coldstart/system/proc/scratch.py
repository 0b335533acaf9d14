"""Temporary directory of one server, private and removed with it.

vLLM creates sockets and a rendezvous file in the temporary directory and does not remove them. So each server has its own
directory (`owned`), whose path is short enough for them. If a server is killed, its supervisor or the next server removes the
directory.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coldstart.artifacts import files
from coldstart.system import paths
from coldstart.system.proc.locked_directory import owned, remove_dead

SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
PREFIX, RECORDING, PROOF = "server-", "recording-", "proof-"
_GATE = "scratch.lock"
# Path of the longest socket below the base in bytes: vLLM's socket names are UUIDs.
_BELOW = len(f"/{PREFIX}12345678/") + 36
_PATIENCE_S = 10.0


@contextmanager
def private_directory(prefix: str) -> Iterator[Path]:
    """Yield a directory of this process that is removed after the block, or by `sweep` after a kill.

    Raises the errors of `scratch`.
    """
    base = _base()
    with owned(base, base / _GATE, prefix) as own:
        yield own


@contextmanager
def scratch() -> Iterator[Path]:
    """Put temporary files and sockets of this process and its children in a directory that is removed after the block.

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


def sweep(ended: int | None = None) -> None:
    """Remove the directories of killed processes. Wait for forks of the server with PID `ended`, which may still be ending.

    Raises:
        OSError: The directory cannot be read.
        UsageError: No private directory can be created.
    """
    base, deadline_s = _base(), time.monotonic() + _PATIENCE_S
    while True:
        with files.locked(base / _GATE):
            owners = [owner for one in (PREFIX, RECORDING, PROOF) for owner in remove_dead(base, one)]
        if str(ended) not in owners or time.monotonic() > deadline_s:
            return
        time.sleep(0.05)


def _base() -> Path:
    return paths.temporary_dir(_BELOW)
