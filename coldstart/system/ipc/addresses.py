"""Addresses at which local clients reach a server, and free ports for new servers."""

from __future__ import annotations

import errno
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

from coldstart.errors import UsageError

_ALL = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def build_local_url(host: str, port: object, scheme: str = "http") -> str:
    """Return the URL, without a path, that local clients of the server at `host` and `port` use."""
    name = _ALL.get(host, host)
    return f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"


def explain_unusable_address(host: str, port: int, error: OSError) -> UsageError:
    """Return the error for an address at which a server cannot listen. If the port is in use, its hint suggests a free one."""
    # The `strerror` of an OSError already contains the address, except if the name was not found.
    reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
    hint = "use another address or port: --host ADDRESS, --port NUMBER"
    if error.errno == errno.EADDRINUSE:
        reason, hint = "another process listens there", f"choose another port: --port {find_free_port()}"
    return UsageError(f"cannot listen at {host}:{port}: {reason}", hint=hint)


_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_SPAN, _TRIES = 16384, 64


def find_free_port(host: str = "") -> int:
    """Return a free TCP port on `host` for a process that will listen on it seconds later.

    The port is below the kernel's range of ephemeral ports (ip(7), ip_local_port_range), because an outgoing connection
    could take a port from that range in the meantime.

    Raises:
        OSError: `host` is not an address of this machine.
    """
    low = int(_EPHEMERAL.read_text().split()[0])
    first = max(1024, low - _SPAN)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    some = [first + secrets.randbelow(low - first) for _ in range(_TRIES if low > first else 0)]
    for port in [*some, 0]:
        try:
            with socket.create_server((host, port), family=family) as sock:
                return int(sock.getsockname()[1])
        except OSError:
            if port == 0:
                raise
    raise AssertionError("unreachable: binding to port 0 succeeds or raises an error")


def close_listening_sockets() -> int:
    """Close all TCP sockets on which this process listens, and return how many there were.

    Their descriptors then refer to an idle eventfd, so that the code that opened them can still close them.
    """
    closed = 0
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208
        with suppress(OSError):  # the descriptor of the listing itself, and descriptors that are not sockets
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
