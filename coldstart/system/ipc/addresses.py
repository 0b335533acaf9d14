"""Where a server that listens at an address can be asked, and where one that is told its port can listen."""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

_ALL = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def reachable(host: str) -> str:
    """The address to connect to on this machine: loopback for a server that listens at every address."""
    return _ALL.get(host, host)


def url(host: str, port: object, scheme: str = "http") -> str:
    """The same as a URL without a path."""
    name = reachable(host)
    return f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"


_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_SPAN, _TRIES = 16384, 64


def free_port(host: str = "") -> int:
    """A TCP port of `host` (IPv4) for a process that listens there seconds later.

    Nobody listens there now, and it lies below the ports that the kernel gives to whoever asks for any (ip(7),
    ip_local_port_range): one of those may be another connection's by then. Raises OSError where `host` is not here.
    """
    low = int(_EPHEMERAL.read_text().split()[0])
    first = max(1024, low - _SPAN)
    some = [first + secrets.randbelow(low - first) for _ in range(_TRIES if low > first else 0)]
    for port in [*some, 0]:
        try:
            with socket.create_server((host, port)) as sock:
                return int(sock.getsockname()[1])
        except OSError:
            if port == 0:
                raise
    raise AssertionError("the last is any")


def stop_listening() -> int:
    """Close every TCP socket at which this process listens, whoever opened it; how many there were.

    Their descriptors stay taken, by something that never wakes, so that whoever opened them can still close them.
    """
    closed = 0
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208
        with suppress(OSError):  # that of the listing itself, and whatever is no socket
            with socket.socket(fileno=os.dup(descriptor)) as sock:
                listens = sock.family != socket.AF_UNIX and sock.getsockopt(
                    socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                )
            if listens:
                nothing = os.eventfd(0)
                os.dup2(nothing, descriptor, inheritable=False)
                os.close(nothing)
                closed += 1
    return closed
