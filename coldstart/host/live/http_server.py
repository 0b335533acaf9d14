"""The HTTP server of a gateway: its socket, its event loop, and uvicorn over an ASGI application."""

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
    """Uvicorn without its signal handlers: a gateway's process has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def create_server(app: Gateway) -> GatewayServer:
    """Return a server that answers with `app`."""
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
    """Bind a socket for the time of the block. Raises UsageError where the address cannot be had."""
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


def url_of(sock: socket.socket) -> str:
    """Return the URL of a bound socket as a client of this machine writes it."""
    host, port = sock.getsockname()[:2]
    return addresses.url(host, port)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the factory of the quickest event loop that is installed; None for asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
