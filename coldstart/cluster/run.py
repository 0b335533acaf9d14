"""The process of `fleet up`: the gateway, and where no cluster was named, a Ray of its own on this machine.

SIGTERM or SIGINT: nothing new is taken, what is in flight is answered, and the process ends; a second one ends it at once. With
a Ray of its own all servers end too; a cluster that was named goes on as it is, and another gateway may come.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from coldstart.cluster import admin, meeting, ray_node, wire
from coldstart.cluster.contact import ControllerAway
from coldstart.cluster.front import FleetFront
from coldstart.cluster.link import RayLink
from coldstart.cluster.meeting import FleetPlace
from coldstart.contract import environment
from coldstart.errors import CommandFailed
from coldstart.fleet.specification import FleetSettings, ServerSpec
from coldstart.gateway.app import HEARTBEAT_S, Gateway
from coldstart.gateway.log import Log
from coldstart.gateway.run import BACKLOG, GatewayServer, HostOptions, listening, loop_factory, shown
from coldstart.machine.paths import Cache

DOWN_S = 30.0


@dataclass(frozen=True)
class FleetUpOptions:
    """Where to listen, and where Ray is (None: here, with `server` as what this machine can).

    `state` is the controller's file; `servers` names what starts model servers there, `module:function`, for tests."""

    cache: Cache
    settings: FleetSettings
    state: Path | None
    server: ServerSpec | None
    address: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    admin_key: str | None = None
    heartbeat_s: float = HEARTBEAT_S
    offline: bool = False
    record: Path | None = None
    servers: str | None = None


class FleetUp:
    """One run. `announce` is told where the fleet is, once requests are taken."""

    def __init__(self, options: FleetUpOptions, log: Log, announce: Callable[[FleetPlace], None]) -> None:
        self.options, self.log, self.announce = options, log, announce
        self.caught: list[int] = []
        self.admin_key = options.admin_key or secrets.token_hex(32)

    def run(self) -> int:
        """Until a signal, or `fleet down`; the exit code. Raises Usage where it cannot listen, CommandFailed without a Ray."""
        options = self.options
        with (
            listening(HostOptions(options.cache, options.host, options.port)) as sock,
            self._ray() as (address, env),
            asyncio.Runner(loop_factory=loop_factory()) as runner,
        ):
            runner.run(self._main(sock, address, env))
        return 128 + self.caught[0] if self.caught else 0

    @contextmanager
    def _ray(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Ray's address, and what its clients' environment needs."""
        if self.options.address is not None:
            yield self.options.address, {}
            return
        token = secrets.token_hex(32)
        env = {
            **ray_node.ENVIRONMENT,
            "RAY_AUTH_TOKEN": token,
            environment.CACHE_DIR: str(self.options.cache.root),
        }
        directory = ray_node.own_directory()
        port = ray_node.free_port()
        log = directory / "head.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ray_node.head(self.options.server, directory, port),
                env=os.environ | env | {str(environment.SUPERVISOR_PID): str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield f"{_wait_for_ray(process, port, log)}:{port}", env
        finally:
            _end(process)
            shutil.rmtree(directory, ignore_errors=True)

    async def _main(self, sock: socket.socket, address: str, env: dict[str, str]) -> None:
        options = self.options
        controller = {
            "state": str(options.state) if options.state else None,
            "settings": wire.document(options.settings),
            "offline": options.offline,
            "servers": options.servers,
            "record": str(options.record) if options.record else None,
        }
        self.link = RayLink({"address": address, "controller": controller}, env, self.log)
        self.front = FleetFront(self.link, log=self.log)
        self.front.facts.url = shown(sock)
        self.server = GatewayServer(self._uvicorn())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop, number)
        place = FleetPlace(
            self.front.facts.url, self.admin_key, os.getpid(), address, env.get("RAY_AUTH_TOKEN", "")
        )
        self.front.begin()
        meeting.leave(place)
        self.announce(place)
        self.log.say("listening", url=place.url, ray=address)
        try:
            await self.server.serve(sockets=[sock])
        finally:
            meeting.gone()
            if options.address is None:
                await self._down()
            await self.front.close()
            await self.link.close()
            self.log.say("ended")

    def _uvicorn(self) -> uvicorn.Config:
        async def down() -> None:
            await self._down()
            self._finish()

        more = admin.routes(self.front, self.admin_key, down)
        app = Gateway(
            self.front, heartbeat_s=self.options.heartbeat_s, api_key=self.options.api_key, more=more
        )
        return uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=60,
            backlog=BACKLOG,
        )

    async def _down(self) -> None:
        with suppress(ControllerAway, TimeoutError):
            await asyncio.wait_for(self.link.call("down"), DOWN_S)

    def _stop(self, number: int) -> None:
        self.caught.append(number)
        self.log.say("stopping", signal=signal.Signals(number).name)
        self._finish()

    def _finish(self) -> None:
        self.front.drain()
        self.server.should_exit = True
        self.server.force_exit = len(self.caught) > 1


def _wait_for_ray(process: subprocess.Popen[bytes], port: int, log: Path) -> str:
    """The address at which the head listens. Raises CommandFailed."""
    import time

    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        text = log.read_text(errors="replace")
        if "Ray runtime started" in text:
            # Ray picks the address itself, whatever it is told of loopback.
            where = next(line for line in text.splitlines() if "Local node IP:" in line)
            return where.rpartition(":")[2].strip()
        time.sleep(0.1)
    said = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it did not say why"]
    raise CommandFailed(f"Ray did not start on this machine: {said[0]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(DOWN_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
