"""`python -m coldstart.weights.prefetch.daemon DIRECTORY DESCRIPTOR`: the prefetcher of the user whose directory it is.

A lock on a file decides who serves: the kernel gives it back when its holder dies, so a socket that is there without the
lock being held is a dead one's, and is replaced. Whoever comes second hands its first client to the first and ends.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

from coldstart.artifacts import files
from coldstart.system.ipc import json_lines, peers
from coldstart.weights.prefetch import configuration, spawning
from coldstart.weights.prefetch.service import Service

_HANDING_OVER_S = 10.0


def main(directory: Path, descriptor: int) -> None:
    """Serve until stopped or idle; `descriptor` is the connection of the client that started this process."""
    client = socket.socket(fileno=descriptor)
    path = spawning.place(directory)
    deadline = time.monotonic() + _HANDING_OVER_S
    while files.try_lock(path.with_suffix(".lock")) is None:  # held until this process ends
        if _handed_over(path, client) or time.monotonic() > deadline:
            return
        time.sleep(0.01)
    _serve(path, client)


def _handed_over(path: Path, client: socket.socket) -> bool:
    try:
        with json_lines.Channel(peers.connect(path)) as connection:
            connection.socket.settimeout(json_lines.PATIENCE_S)
            connection.send({"op": "adopt"}, (client.fileno(),))
            return any(message.get("adopted") for message in connection.replies())
    except (peers.PeerError, OSError):
        return False


def _serve(path: Path, client: socket.socket) -> None:
    listener = peers.Listener(path)
    try:
        service = Service(listener, configuration.from_environment())
        signal.signal(signal.SIGTERM, lambda *_: service.stop())
        service.adopt(client)
        service.run()
    finally:
        path.unlink(missing_ok=True)
    # Streams may hang in a read from a server; nothing of theirs is worth waiting for.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
