"""HTTP server of a gateway: its socket, its event loop, and uvicorn with an ASGI application."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from coldstart.errors import UsageError
from coldstart.host.live.app import Gateway
from coldstart.system.ipc import addresses

BACKLOG = 2048


class GatewayServer(uvicorn.Server):
    """Uvicorn server without signal handlers: a gateway's process has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def create_server(app: Gateway) -> GatewayServer:
    """Return a server for the application `app`."""
    return GatewayServer(
        uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=60,
            backlog=BACKLOG,
        )
    )


@contextmanager
def listen(host: str, port: int) -> Iterator[socket.socket]:
    """Listen on a socket during the block. Raises UsageError if the address cannot be bound."""
    if not 0 <= port <= 65535:  # getaddrinfo would take the lower 16 bits
        raise UsageError(f"cannot listen at {host}:{port}: the port is above 65535", hint="--port NUMBER")
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        raise UsageError(
            f"cannot listen at {host}:{port}: {error.strerror or error}",
            hint="choose another: --host ADDRESS, --port NUMBER",
        ) from error
    with sock:
        yield sock


def format_url(sock: socket.socket) -> str:
    """Return the URL of a bound socket for clients on this machine."""
    host, port = sock.getsockname()[:2]
    return addresses.url(host, port)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the uvloop event loop factory if uvloop is installed; None for asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
