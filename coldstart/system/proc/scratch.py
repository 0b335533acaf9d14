"""Directories for temporary files and sockets of one process (see `files.create_owned_directory`).

vLLM creates sockets and a rendezvous file in the temporary directory and does not remove them. So each server has its own
directory (`use_scratch_directory`), with a path that is short enough for sockets. If a server is killed, its supervisor
or the next server removes the directory.
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

SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
PREFIX, RECORDING, PROOF = "server-", "recording-", "proof-"
# Path of the longest socket below the base in bytes: vLLM's socket names are UUIDs.
_SOCKET_PATH_BYTES = len(f"/{PREFIX}12345678/") + 36
_PATIENCE_S = 10.0


@contextmanager
def private_directory(prefix: str) -> Iterator[Path]:
    """Yield a directory of this process that is removed after the block or, after a kill, by `remove_dead_directories`.

    Raises the errors of `use_scratch_directory`.
    """
    with files.create_owned_directory(_choose_base(), prefix) as own:
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
        owners = [owner for one in (PREFIX, RECORDING, PROOF) for owner in files.remove_dead_below(base, one)]
        if str(ended) not in owners or time.monotonic() > deadline_s:
            return
        time.sleep(0.05)


def _choose_base() -> Path:
    return paths.temporary_dir(_SOCKET_PATH_BYTES)
