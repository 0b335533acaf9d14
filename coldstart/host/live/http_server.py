"""HTTP server of a gateway: its socket, its event loop, and uvicorn with an ASGI application."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import uvicorn

from coldstart.errors import UsageError
from coldstart.host.endpoint import GatewayEndpoint
from coldstart.host.live.app import Gateway
from coldstart.host.live.bounded_protocol import BoundedProtocol
from coldstart.system.ipc import addresses

BACKLOG = 2048
# Descriptors for log files, sockets of servers that start, and libraries.
RESERVED_DESCRIPTORS = 256
# Time in which the answers of killed servers reach their clients when the gateway ends at once.
LAST_ANSWERS_S = 1.0


class GatewayServer(uvicorn.Server):
    """Uvicorn server without signal handlers, which a gateway's process has. It calls `look_at_files` once a second."""

    def __init__(self, config: uvicorn.Config, look_at_files: Callable[[], None]) -> None:
        super().__init__(config)
        self.look_at_files = look_at_files

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self, *, at_once: bool = False) -> None:
        """Accept no more connections, and end when the running requests have ended; `at_once` waits for none of them."""
        self.should_exit = True
        if at_once:
            self.force_exit = True
            # Uvicorn leaves connections open, for which asyncio's server waits from Python 3.12 on.
            asyncio.get_running_loop().call_later(LAST_ANSWERS_S, self.break_connections)

    def break_connections(self) -> None:
        """End all connections without the rest of their answers."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def on_tick(self, counter: int) -> bool:
        """Look at the files (uvicorn's Server calls this ten times per second)."""
        if counter % 10 == 0:
            self.look_at_files()
        return await super().on_tick(counter)


def create_server(app: Gateway, look_at_files: Callable[[], None] = lambda: None) -> GatewayServer:
    """Return a server for `app` with the limits of its endpoint; raise this process's limit of open files.

    Once a second it reads changed keys of clients, and calls `look_at_files`.
    """

    def refresh_files() -> None:
        app.access.refresh_keys()
        look_at_files()

    limits = app.endpoint.limits
    connections = min(limits.connections, raise_connection_limit())
    config = uvicorn.Config(
        app,
        http=cast("Any", partial(BoundedProtocol, limits, connections, app.front.facts.refused)),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        # Uvicorn warns of each invalid request, so any client could fill the log.
        log_level="error",
        # Any local process could claim another client's address by X-Forwarded-For.
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=cast("int", limits.idle_s),  # a float works, too
        ssl_certfile=app.endpoint.tls_cert,
        ssl_keyfile=app.endpoint.tls_key,
        backlog=BACKLOG,
    )
    return GatewayServer(config, refresh_files)


def raise_connection_limit() -> int:
    """Raise the soft limit of descriptors to the hard limit; return how many clients can then be connected.

    A client takes two descriptors: its connection and one to the model's server.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return 1 << 20
    used = len(list(Path("/proc/self/fd").iterdir()))
    return max(1, (hard - used - RESERVED_DESCRIPTORS) // 2)


@contextmanager
def listen(endpoint: GatewayEndpoint) -> Iterator[socket.socket]:
    """Listen on a socket during the block.

    Raises UsageError if the endpoint is open to others by accident, or its certificate or its address cannot be used.
    """
    endpoint.check()
    if endpoint.tls_cert is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(endpoint.tls_cert, endpoint.tls_key)
        except OSError as error:  # includes ssl.SSLError
            raise UsageError(
                f"cannot use the certificate {endpoint.tls_cert}: {error.strerror or error}",
                hint="pass PEM files: --tls-cert CHAIN --tls-key KEY",
            ) from error
    host, port = endpoint.host, endpoint.port
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise addresses.explain_port_in_use(host, port) from error
        # Python adds the address to the text of `strerror`, except for a name that is not found.
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise UsageError(
            f"cannot listen at {host}:{port}: {reason}",
            hint="use another address or port: --host ADDRESS, --port NUMBER",
        ) from error
    with sock:
        yield sock


def format_url(sock: socket.socket, endpoint: GatewayEndpoint) -> str:
    """Return the URL of a bound socket for clients on this machine."""
    host, port = sock.getsockname()[:2]
    return addresses.build_url(host, port, "http" if endpoint.tls_cert is None else "https")
