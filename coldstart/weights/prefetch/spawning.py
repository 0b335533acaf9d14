"""Connect to the prefetcher of one source and plan, and start it if none runs.

A new process gets one end of a socket pair. The client can send its request at once, and the process reads it
after start. If another prefetcher started first, the new process closes the socket, and the client connects again.
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

# The shell exits at once, so the prefetcher is not a child of the client and leaves no zombie there.
_DETACH = '"$@" &'


def place(directory: Path | None, name: str) -> Path:
    """Return the path of the socket of the prefetcher of the weights `name`."""
    return (directory or paths.runtime_dir()) / f"prefetch-{name}.socket"


def list_sockets(directory: Path | None) -> list[Path]:
    """Return the sockets of all prefetchers of this user."""
    return sorted((directory or paths.runtime_dir()).glob("prefetch-*.socket"))


def connection(directory: Path | None, name: str, *, start: bool) -> socket.socket:
    """Return a socket that is connected to the prefetcher of the weights `name`.

    Raises:
        PrefetchLostError: No prefetcher runs and `start` is false.
        PrefetchError: No prefetcher can be started.
    """
    try:
        path = place(directory, name)
    except (ColdstartError, OSError) as error:
        raise PrefetchError(f"cannot find a directory for the prefetcher's socket: {error}") from error
    try:
        return peers.connect(path)
    except peers.PeerError as error:
        if not start:
            raise PrefetchLostError("no prefetcher runs") from error
    return spawn(path)


def last_words(directory: Path | None, name: str) -> str:
    """Return the last line of the ended prefetcher's log to append to an error; "" if the log is empty."""
    try:
        lines = place(directory, name).with_suffix(".log").read_text(errors="replace").splitlines()
    except (ColdstartError, OSError):
        return ""
    return f"; its log ends: {lines[-1]}" if lines else ""


def spawn(path: Path) -> socket.socket:
    """Start a prefetcher that listens at `path` and return a connection to it, without waiting for it. Raises PrefetchError."""
    parent, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    command = [
        sys.executable,
        "-m",
        "coldstart.weights.prefetch.daemon",
        str(path),
        str(child.fileno()),
    ]
    log = -1
    try:
        log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
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
        raise PrefetchError(f"cannot start the prefetcher: {error}") from error
    finally:
        child.close()
        with suppress(OSError):
            os.close(log)
    return parent
