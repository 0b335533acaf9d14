"""A connection to the prefetcher, whether it runs already or not.

A process that is not there yet is given one end of a socket pair: the request can be written at once and is read when it
has come up. If another comes up first, it is handed that end.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from coldstart.errors import ColdstartError
from coldstart.system import paths
from coldstart.system.ipc import peers
from coldstart.weights.prefetch.errors import PrefetchError, PrefetchLostError

# The shell ends at once: the prefetcher is nobody's child here, and leaves no zombie in a client that lives long.
_DETACH = '"$@" &'


def place(directory: Path | None) -> Path:
    """Where the socket lies."""
    return (directory or paths.runtime_dir()) / "prefetch.socket"


def connection(directory: Path | None, *, start: bool) -> socket.socket:
    """A connected socket.

    Raises PrefetchLostError when none runs and `start` is false, PrefetchError when none can be started.
    """
    try:
        path = place(directory)
    except (ColdstartError, OSError) as error:
        raise PrefetchError(f"There is no place for the prefetcher's socket: {error}") from error
    try:
        return peers.connect(path)
    except peers.PeerError as error:
        if not start:
            raise PrefetchLostError("No prefetcher runs.") from error
    return spawn(path.parent)


def last_words(directory: Path | None) -> str:
    """What a prefetcher that has ended wrote last, as a sentence to append; empty when it wrote nothing."""
    try:
        lines = place(directory).with_suffix(".log").read_text(errors="replace").splitlines()
    except (ColdstartError, OSError):
        return ""
    return f" Its log ends: {lines[-1]}" if lines else ""


def spawn(directory: Path) -> socket.socket:
    """Start a prefetcher and return a connection to it, without waiting for it. Raises PrefetchError."""
    parent, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    command = [
        sys.executable,
        "-m",
        "coldstart.weights.prefetch.daemon",
        str(directory),
        str(child.fileno()),
    ]
    log = -1
    try:
        log = os.open(directory / "prefetch.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        subprocess.run(
            ["/bin/sh", "-c", _DETACH, "sh", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(child.fileno(),),
            cwd="/",
            start_new_session=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        parent.close()
        raise PrefetchError(f"The prefetcher cannot be started: {error}.") from error
    finally:
        child.close()
        with suppress(OSError):
            os.close(log)
    return parent
