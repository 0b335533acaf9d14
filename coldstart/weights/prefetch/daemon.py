"""Prefetcher process of one source and plan: `python -m coldstart.weights.prefetch.daemon SOCKET DESCRIPTOR`.

A file lock decides which process serves. The kernel releases the lock when its holder dies, so a socket
without a held lock is stale and is replaced. A process that does not get the lock exits when the lock's holder
serves, and its client connects again. The holder removes socket, lock and log when it ends.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

from coldstart.artifacts import files
from coldstart.system.ipc import peers
from coldstart.weights.prefetch.service import Service

_STARTING_S = 10.0


def main(path: Path, descriptor: int) -> None:
    """Serve until stopped or idle.

    Args:
        path: The socket to listen on.
        descriptor: Connection of the client that started this process.
    """
    client = socket.socket(fileno=descriptor)
    deadline = time.monotonic() + _STARTING_S
    while not _locked(path.with_suffix(".lock")):
        if _is_served(path) or time.monotonic() > deadline:
            return
        time.sleep(0.01)
    _serve(path, client)


def _locked(path: Path) -> bool:
    """Lock the file until this process exits, unless another process has the lock or has just removed the file."""
    handle = files.try_lock(path)
    if handle is None:
        return False
    try:
        if os.path.samestat(os.fstat(handle), path.stat()):
            return True
    except FileNotFoundError:
        pass
    os.close(handle)
    return False


def _is_served(path: Path) -> bool:
    try:
        peers.connect(path).close()
    except peers.PeerError:
        return False
    return True


def _serve(path: Path, client: socket.socket) -> None:
    failed = True
    try:
        service = Service(peers.Listener(path))
        signal.signal(signal.SIGTERM, lambda *_: service.stop())
        service.adopt(client)
        service.run()
        failed = False
    except Exception:  # noqa: BLE001 - the log explains the error to the client
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        for suffix in (".socket", ".lock") if failed else (".log", ".socket", ".lock"):
            path.with_suffix(suffix).unlink(missing_ok=True)
    # Exit without joining the streams: they may block in a read from a server.
    os._exit(failed)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
