"""Process of `fleet up`: the gateway and controller of a fleet, connected to Ray. It starts Ray if no cluster address is given.

On SIGTERM or SIGINT, the process rejects new requests, completes running requests and exits. A second signal makes it exit
immediately and kill the Ray cluster that it started, if any. All servers in that cluster exit too. If that cluster exits by
itself, the process exits within a minute and reports the reason. Servers in another cluster keep running, and the next `fleet
up` adopts them.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from coldstart.errors import CommandFailedError
from coldstart.fleet.live import admin, local_state
from coldstart.fleet.live.control import FleetControl
from coldstart.fleet.live.local_state import LocalFleet
from coldstart.fleet.live.ray_process import OwnRay, run_own_ray
from coldstart.fleet.live.state import FleetState
from coldstart.fleet.specification import FleetSettings, ServerSpec
from coldstart.host.endpoint import GatewayEndpoint
from coldstart.host.live.app import Gateway
from coldstart.host.live.http_server import create_server, format_url, listen
from coldstart.host.live.log import Log, capture_loggers
from coldstart.system.paths import Cache

POLL_S, RAY_GRACE_S = 0.5, 50.0
"""RAY_GRACE_S is below the minute after which Ray ends its other nodes and clients if its control service has failed."""


@dataclass(eq=False)
class FleetUp:
    """One run of `fleet up`. `on_listening` is called with the address and keys of the fleet once the gateway listens.

    `address` is the address of Ray. If it is None, Ray is started on this machine, with labels that describe `server`.
    `state` is the path of the state file. In tests, `server_factory` replaces the factory of model servers and is
    written as `module:function`.
    """

    cache: Cache
    settings: FleetSettings
    log: Log
    on_listening: Callable[[LocalFleet], None]
    state: Path | None = None
    server: ServerSpec | None = None
    address: str | None = None
    endpoint: GatewayEndpoint = field(default_factory=GatewayEndpoint)
    admin_key: str | None = None
    offline: bool = False
    server_factory: str | None = None

    def __post_init__(self) -> None:
        self.signals: list[int] = []
        self.ray_error = ""
        self.ray: OwnRay | None = None
        self.key = self.admin_key or secrets.token_hex(32)

    def run(self) -> int:
        """Run until a signal or `fleet down`, and return the exit code.

        Raises:
            UsageError: The gateway cannot listen, or the state file cannot be read.
            CommandFailedError: Ray does not start, cannot be reached, has another gateway, or exits.
        """
        state = FleetState(self.state, self.log)
        with (
            capture_loggers(self.log),
            listen(self.endpoint) as sock,
            run_own_ray(self.server, self.cache) if self.address is None else nullcontext() as ray,
        ):
            address, env = (ray.address, ray.env) if ray else (self.address or "", {})
            # Ray reads its settings when it is imported, which takes seconds. A call after disconnecting must not
            # start another Ray.
            os.environ.update({**env, "RAY_ENABLE_AUTO_CONNECT": "0"})
            from coldstart.fleet.live import membership

            self.end_servers, self.ray = membership.stop_all_servers, ray
            self.control = FleetControl(self.settings, state, log=self.log)
            with (
                membership.connect_to_ray(address),
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            ):
                runner.run(self._main(sock, address, env.get("RAY_AUTH_TOKEN", "")))
            if self.ray_error:
                raise CommandFailedError(
                    f"the fleet's Ray cluster stopped: {self.ray_error}",
                    hint="run `coldstart fleet up` to start it again",
                )
        return 128 + self.signals[0] if self.signals else 0

    async def _main(self, sock: socket.socket, address: str, token: str) -> None:
        from coldstart.fleet.live.membership import Membership

        self.control.facts.url = format_url(sock, self.endpoint)
        self.http = create_server(self._app())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        membership = Membership(self.control, {"offline": self.offline, "servers": self.server_factory})
        await membership.recover()
        watched = asyncio.create_task(self._watch_ray(asyncio.create_task(membership.watch())))
        fleet = LocalFleet(self.control.facts.url, self.key, os.getpid(), address, token)
        local_state.write_fleet(fleet)
        self.on_listening(fleet)
        self.log.write("listening", url=fleet.url, ray=address)
        try:
            await self.http.serve_process(sock)
        finally:
            local_state.remove_fleet()
            watched.cancel()
            self.control.close()
            if self.ray is not None and not self.ray.node.has_ended():
                self.end_servers()
            self.log.write("ended")

    def _app(self) -> Gateway:
        async def down() -> None:
            self.control.close()
            self.end_servers()
            self._shut_down()

        return Gateway(
            self.control, endpoint=self.endpoint, more=admin.create_routes(self.control, self.key, down)
        )

    async def _watch_ray(self, seeing: asyncio.Task[None]) -> None:
        """Shut down when Ray exits on this machine. If it was the fleet's own Ray, serve for up to RAY_GRACE_S more seconds."""
        ray = self.ray
        while not seeing.done() and (ray is None or not ray.node.has_ended()):
            await asyncio.sleep(POLL_S)
        self.ray_error = ray.node.find_error() if ray else "the Ray node on this machine exited"
        self.log.write("ray ended", reason=self.ray_error)
        end = asyncio.get_running_loop().time() + RAY_GRACE_S
        while ray and self.control.replicas and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(POLL_S)
        self._shut_down()

    def _on_signal(self, number: int) -> None:
        self.signals.append(number)
        self.log.write("stopping", signal=signal.Signals(number).name, at_once=len(self.signals) > 1)
        self._shut_down()
        if len(self.signals) > 1 and self.ray is not None:
            self.ray.node.kill()

    def _shut_down(self) -> None:
        self.control.reject_requests()
        self.http.stop(at_once=len(self.signals) > 1)
