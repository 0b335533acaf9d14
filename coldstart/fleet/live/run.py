"""Process of `fleet up`: the gateway, and its own Ray on this machine if no cluster is named.

On SIGTERM or SIGINT, new requests are rejected, running requests are answered, and the process ends; a second signal
ends it at once. All servers of the fleet's own Ray end too. If that Ray ends, the process ends within a minute and reports the
reason. A named cluster continues to run, and another gateway may connect.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from coldstart.errors import CommandFailedError
from coldstart.fleet.live import admin, local_state, wire
from coldstart.fleet.live.contact import ControllerAwayError
from coldstart.fleet.live.controller_connection import RayConnection
from coldstart.fleet.live.front import FleetFront
from coldstart.fleet.live.local_state import LocalFleet
from coldstart.fleet.live.ray_process import OwnRay, own_ray
from coldstart.fleet.specification import FleetSettings, ServerSpec
from coldstart.host.endpoint import GatewayEndpoint
from coldstart.host.live.app import HEARTBEAT_S, Gateway
from coldstart.host.live.http_server import create_server, format_url, listen, loop_factory
from coldstart.host.live.log import Log, capture_loggers
from coldstart.system.paths import Cache

DOWN_S, WATCH_S = 30.0, 0.5
WARM_S = 60.0
"""Time in seconds for which other nodes of Ray live without the first node."""


@dataclass(frozen=True)
class FleetUpOptions:
    """Address to listen on, and Ray's address (None: on this machine, with `server` as its labels).

    `state` is the controller's file; `servers` names the factory of model servers, `module:function`, for tests.
    """

    cache: Cache
    settings: FleetSettings
    state: Path | None
    server: ServerSpec | None
    address: str | None = None
    endpoint: GatewayEndpoint = field(default_factory=GatewayEndpoint)
    admin_key: str | None = None
    heartbeat_s: float = HEARTBEAT_S
    offline: bool = False
    record: Path | None = None
    servers: str | None = None


class FleetUp:
    """One run of `fleet up`. `announce` gets the fleet's address once the gateway listens."""

    def __init__(self, options: FleetUpOptions, log: Log, announce: Callable[[LocalFleet], None]) -> None:
        self.options, self.log, self.announce = options, log, announce
        self.caught: list[int] = []
        self.ray_ended = False
        self.admin_key = options.admin_key or secrets.token_hex(32)

    def run(self) -> int:
        """Run until a signal or `fleet down`; return the exit code.

        Raises:
            UsageError: The gateway cannot listen.
            CommandFailedError: The fleet's own Ray does not start, or ends.
        """
        options = self.options
        with (
            capture_loggers(self.log),
            listen(options.endpoint) as sock,
            own_ray(options.server, options.cache) if options.address is None else nullcontext() as ray,
            asyncio.Runner(loop_factory=loop_factory()) as runner,
        ):
            runner.run(self._main(sock, ray))
            if ray is not None and self.ray_ended:
                raise CommandFailedError(
                    f"the fleet's Ray ended: {ray.node.last_words()}", hint="coldstart fleet up"
                )
        return 128 + self.caught[0] if self.caught else 0

    async def _main(self, sock: socket.socket, ray: OwnRay | None) -> None:
        options = self.options
        address, env = (ray.address, ray.env) if ray else (options.address or "", {})
        controller = {
            "state": str(options.state) if options.state else None,
            "settings": wire.document(options.settings),
            "offline": options.offline,
            "servers": options.servers,
            "record": str(options.record) if options.record else None,
        }
        self.connection = RayConnection({"address": address, "controller": controller}, env, self.log)
        self.front = FleetFront(self.connection, log=self.log)
        self.front.facts.url = format_url(sock, self.options.endpoint)
        self.server = create_server(self._app())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop, number)
        place = LocalFleet(
            self.front.facts.url, self.admin_key, os.getpid(), address, env.get("RAY_AUTH_TOKEN", "")
        )
        self.front.begin()
        local_state.save(place)
        self.announce(place)
        self.log.say("listening", url=place.url, ray=address)
        watched = asyncio.create_task(self._watch(ray)) if ray else None
        try:
            await self.server.serve(sockets=[sock])
        finally:
            local_state.clear()
            if watched is not None:
                watched.cancel()
            if ray is not None and not ray.node.has_ended():
                await self._down()
            await self.front.close()
            await self.connection.close()
            self.log.say("ended")

    def _app(self) -> Gateway:
        async def down() -> None:
            await self._down()
            self._finish()

        more = admin.routes(self.front, self.admin_key, down)
        return Gateway(
            self.front, heartbeat_s=self.options.heartbeat_s, endpoint=self.options.endpoint, more=more
        )

    async def _watch(self, ray: OwnRay) -> None:
        """Wait for the end of the own Ray, which the fleet does not survive; then serve from other nodes while they live."""
        while not ray.node.has_ended():
            await asyncio.sleep(WATCH_S)
        self.ray_ended = True
        self.log.say("ray ended", reason=ray.node.last_words())
        end = asyncio.get_running_loop().time() + WARM_S
        while self.front.targets.routed and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(WATCH_S)
        self._finish()

    async def _down(self) -> None:
        with suppress(ControllerAwayError, TimeoutError):
            await asyncio.wait_for(self.connection.end_fleet(), DOWN_S)

    def _stop(self, number: int) -> None:
        self.caught.append(number)
        self.log.say("stopping", signal=signal.Signals(number).name)
        self._finish()

    def _finish(self) -> None:
        self.front.drain()
        self.server.should_exit = True
        self.server.force_exit = len(self.caught) > 1
