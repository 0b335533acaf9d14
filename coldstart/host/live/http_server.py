"""HTTP server of a gateway: its socket, its event loop, and uvicorn with an ASGI application."""

from __future__ import annotations

import asyncio
import gc
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
# Descriptors reserved for log files, sockets of starting servers, and libraries.
RESERVED_DESCRIPTORS = 256
# Seconds in which responses about killed servers can reach their clients when the gateway stops immediately.
LAST_ANSWERS_S = 1.0


class GatewayServer(uvicorn.Server):
    """Uvicorn server without signal handlers of its own. It calls `check_files` every second."""

    def __init__(self, config: uvicorn.Config, check_files: Callable[[], None]) -> None:
        super().__init__(config)
        self.check_files = check_files

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def serve_process(self, sock: socket.socket) -> None:
        """Serve on `sock` until the server stops. A process calls this once, when it has created all that it serves with.

        A full garbage collection stops all streams, so exempt what exists now, mostly imported modules, from collections.
        """
        gc.collect()
        gc.freeze()
        await self.serve(sockets=[sock])

    def stop(self, *, at_once: bool = False) -> None:
        """Accept no more connections, and exit when the running requests have ended, or immediately if `at_once` is set."""
        self.should_exit = True
        if at_once:
            self.force_exit = True
            # Uvicorn leaves connections open, and from Python 3.12 on asyncio's server waits for them.
            asyncio.get_running_loop().call_later(LAST_ANSWERS_S, self.abort_connections)

    def abort_connections(self) -> None:
        """Abort all connections without sending the rest of their responses."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def on_tick(self, counter: int) -> bool:
        """Call `check_files` in every tenth call, which is once per second. Return whether the server must exit (uvicorn)."""
        if counter % 10 == 0:
            self.check_files()
        return await super().on_tick(counter)


def create_server(app: Gateway, check_files: Callable[[], None] = lambda: None) -> GatewayServer:
    """Create a server for `app` with the limits of its endpoint, and raise this process's limit on open files.

    Once per second, the server reloads changed client keys and calls `check_files`.
    """

    def refresh_files() -> None:
        app.access.reload_changed_keys()
        check_files()

    limits = app.endpoint.limits
    connections = min(limits.connections, raise_connection_limit())
    config = uvicorn.Config(
        app,
        http=cast("Any", partial(BoundedProtocol, limits, connections, app.router.facts.refused)),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        # Uvicorn logs a warning for each invalid request, so any client could fill the log.
        log_level="error",
        # Any local process could claim another client's address by X-Forwarded-For.
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=cast("int", limits.idle_s),  # a float also works
        ssl_certfile=app.endpoint.tls_cert,
        ssl_keyfile=app.endpoint.tls_key,
        backlog=BACKLOG,
    )
    return GatewayServer(config, refresh_files)


def raise_connection_limit() -> int:
    """Raise the soft limit on open files to the hard limit. Return the number of clients that can then connect.

    A client uses two descriptors: its own connection, and one to the model's server.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return 1 << 20
    used = len(list(Path("/proc/self/fd").iterdir()))
    return max(1, (hard - used - RESERVED_DESCRIPTORS) // 2)


@contextmanager
def listen(endpoint: GatewayEndpoint) -> Iterator[socket.socket]:
    """Open a listening socket for the duration of the block.

    Raises UsageError if the endpoint would be exposed unintentionally, or if its certificate or address cannot be used.
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
        raise addresses.explain_unusable_address(host, port, error) from error
    with sock:
        yield sock


def format_url(sock: socket.socket, endpoint: GatewayEndpoint) -> str:
    """Return the URL at which clients on this machine can reach a bound socket."""
    host, port = sock.getsockname()[:2]
    return addresses.build_local_url(host, port, "http" if endpoint.tls_cert is None else "https")
