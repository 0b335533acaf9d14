"""Addresses that a client on this machine can use, parsed by the standard library."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path


def test_stop_listening_leaves_other_descriptors_open(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as two,
        socket.socket(socket.AF_UNIX) as local,
        socket.create_connection(one.getsockname()) as connected,
    ):
        local.bind(str(tmp_path / "socket"))
        local.listen()
        ports = [held.getsockname() for held in (one, two)]
        numbers = [held.fileno() for held in (one, two)]
        code = (
            "import os, socket, sys\n"
            "from coldstart.system.ipc import addresses\n"
            "numbers = [int(word) for word in sys.argv[1:]]\n"
            "print(addresses.stop_listening(), all(os.readlink(f'/proc/self/fd/{n}') == 'anon_inode:[eventfd]' for n in"
            " numbers[:2]), [socket.socket(fileno=n).getsockname() != '' for n in numbers[2:]])\n"
        )
        kept = [local.fileno(), connected.fileno()]
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, numbers + kept)],
            pass_fds=numbers + kept,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == "2 True [True, True]\n"
    # No other process holds the ports, so they can be bound again.
    for family, address in zip((socket.AF_INET, socket.AF_INET6), ports, strict=True):
        socket.create_server(address[:2], family=family).close()
