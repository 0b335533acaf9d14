"""A temporary directory of one server: private from birth, and gone with it, however it ends.

vLLM names sockets and a rendezvous file in the directory for temporary files and leaves them there. So a server has a directory
of its own (`owned`), and where it is killed, its supervisor or the next server removes that.
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
PREFIX = "server-"
_GATE = "scratch.lock"
# A unix socket's path may have 107 bytes; vLLM's sockets are called by a UUID.
_LONGEST = 107 - 1 - 36
_PATIENCE_S = 10.0


@contextmanager
def scratch() -> Iterator[Path]:
    """From here on this process and its children put temporary files and sockets in a directory that ends with the block.

    Raises OSError, and Usage where no private place can be had.
    """
    base = _base()
    with owned(base, base / _GATE, PREFIX) as own:
        before = _use(own)
        try:
            yield own
        finally:
            _put_back(before)


def sweep(ended: int | None = None) -> None:
    """Remove the directories of servers that were killed; what the one whose pid was `ended` has forked may still be ending.

    Raises OSError, and Usage where no private place can be had.
    """
    base, deadline_s = _base(), time.monotonic() + _PATIENCE_S
    while True:
        with files.locked(base / _GATE):
            owners = remove_dead(base, PREFIX)
        if str(ended) not in owners or time.monotonic() > deadline_s:
            return
        time.sleep(0.05)


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
