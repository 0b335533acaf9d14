"""Main process of a host, which listens, reloads its configuration file, and shuts down.

On SIGTERM, SIGINT or POST /stop, the host rejects new requests, completes running ones, stops every server, and exits. A
second signal, or the end of `drain_s` seconds, stops everything immediately. The host reloads its configuration on SIGHUP,
on POST /reload, and when the file changes. An invalid file changes nothing. A SIGHUP from a closed terminal stops the host.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from coldstart.errors import UsageError
from coldstart.host.configuration import CHANGE_KINDS, HostFile, describe_changes
from coldstart.host.endpoint import GatewayEndpoint
from coldstart.host.events import Failure
from coldstart.host.live import messages
from coldstart.host.live.app import Gateway
from coldstart.host.live.driver import Driver
from coldstart.host.live.host_routes import create_host_routes
from coldstart.host.live.http_server import create_server, format_url, listen
from coldstart.host.live.lifecycle import STOPPING
from coldstart.host.live.log import BackgroundTasks, Log, capture_loggers, describe_failure
from coldstart.host.live.profiles import MemoryMeter, find_template_bytes
from coldstart.host.live.servers import ServerStarter, create_host_directory
from coldstart.system import runtime
from coldstart.system.file_state import find_state
from coldstart.system.paths import Cache
from coldstart.system.proc.processes import has_terminal


@dataclass(eq=False)
class ModelHost:
    """One run of a host. `read_file` reads the configuration again. `on_listening` receives the URL once the host listens.

    `config_path` is the configuration file to watch.
    """

    file: HostFile
    read_file: Callable[[], HostFile]
    cache: Cache
    log: Log
    on_listening: Callable[[str, HostFile], None]
    endpoint: GatewayEndpoint = field(default_factory=GatewayEndpoint)
    config_path: Path | None = None
    offline: bool = False
    drain_s: float | None = None

    def __post_init__(self) -> None:
        self.caught: list[int] = []
        self._tasks = BackgroundTasks(self.log)
        # Record the state now, so that a change before the first check is detected.
        self._known = self.config_path and find_state(self.config_path)

    def run(self) -> int:
        """Run until a signal arrives, and return 128 plus its number. Raises UsageError if the host cannot listen."""
        with (
            capture_loggers(self.log),
            listen(self.endpoint) as sock,
            create_host_directory() as directory,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            runner.run(self._main(sock, directory))
        return 128 + self.caught[0] if self.caught else 0

    async def _main(self, sock: socket.socket, directory: Path) -> None:
        starter = ServerStarter(directory, self.cache, offline=self.offline)
        starter.start_process()
        meter = MemoryMeter(on_cpu=runtime.targets_cpu())
        self.driver = Driver(
            self.file, starter, log=self.log, meter=meter, template_bytes=find_template_bytes()
        )
        self.gateway = Gateway(
            self.driver,
            endpoint=self.endpoint,
            routes=[
                *create_host_routes(self.driver),
                Route("/reload", self._answer_reload, methods=["POST"]),
                Route("/stop", self._answer_stop, methods=["POST"]),
            ],
        )
        self.server = create_server(self.gateway, self._check_file)
        facts = self.driver.facts
        facts.url, facts.config_loaded_unix_s = format_url(sock, self.endpoint), time.time()
        facts.config_path = str(self.config_path) if self.config_path else None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        self._reloading = asyncio.Lock()
        # With nohup, SIGHUP is ignored, so that a process outlives its terminal.
        self._stops_with_terminal = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN and has_terminal()
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        self.driver.begin()
        self.on_listening(facts.url, self.file)
        self.log.write("listening", url=facts.url, models=list(self.file.catalogue.launches))
        try:
            await self.server.serve_process(sock)
        finally:
            self._tasks.cancel()
            if not self.driver.facts.stopping:
                self.driver.drain()
            await self.driver.close(at_once=len(self.caught) > 1)
            self.log.write("ended")

    def _stop(self, number: int) -> None:
        self.caught.append(number)
        self.log.write("stopping", signal=signal.Signals(number).name, at_once=len(self.caught) > 1)
        if len(self.caught) == 1:
            self.driver.drain()
            self._tasks.spawn(self._end())
            if self.drain_s is not None:
                asyncio.get_running_loop().call_later(self.drain_s, self._stop, number)
        else:
            self.server.stop(at_once=True)
            self.driver.lifecycle.kill()

    async def _end(self) -> None:
        """Stop listening when every server has exited. Until then, rejected requests get a response."""
        await self.driver.close()
        self.server.stop()

    def _hang_up(self) -> None:
        """Stop the host if its terminal was closed. Otherwise reload the configuration file."""
        if not self._stops_with_terminal or has_terminal():
            self._tasks.spawn(self._reread())
        elif not self.caught:  # the kernel and the shell may both report the closed terminal
            self._stop(signal.SIGHUP)

    async def _answer_stop(self, request: Request) -> Response:
        """Stop the host as SIGTERM does, unless it is already stopping. Respond with the number of running requests."""
        if not self.caught:
            self._stop(signal.SIGTERM)
        in_flight = sum(len(model.in_flight) for model in self.driver.core.models.values())
        return JSONResponse({"stopping": True, "in_flight": in_flight}, status_code=202)

    async def _answer_reload(self, request: Request) -> Response:
        try:
            return JSONResponse(await self.reload())
        except UsageError as error:
            return messages.build_error_response(400, error.message, hint=error.hint or "")

    def _check_file(self) -> None:
        seen = self.config_path and find_state(self.config_path)
        if seen is not None and seen != self._known:
            self._tasks.spawn(self._reread())

    async def _reread(self) -> None:
        with suppress(UsageError):
            await self.reload()

    async def reload(self) -> dict[str, Any]:
        """Reload the configuration and the client keys. Return the changes to the configuration.

        Raises:
            UsageError: The host is stopping, or a file is invalid. The previous content of an invalid file remains in effect.
        """
        self._known = self.config_path and find_state(self.config_path)
        # Serialize reloads, so that an older version of the file does not replace a newer one.
        async with self._reloading:
            refused = self.gateway.access.reload_keys()
            changes = await self._read()
            if refused is not None:
                raise UsageError(refused.message, hint=refused.hint)
            return changes

    async def _read(self) -> dict[str, list[str]]:
        facts = self.driver.facts
        try:
            # Bundle lookups are slow, so they run in a thread to keep the event loop responsive.
            file = await asyncio.to_thread(self.read_file)
            if not facts.stopping:
                self.driver.configure(file)
        except Exception as error:  # an invalid configuration must not stop running servers
            failure = describe_failure(error) or Failure(f"{type(error).__name__}: {error}")
            facts.config_error = str(failure)
            self.log.write("configuration refused", reason=facts.config_error)
            raise UsageError(failure.message, hint=failure.hint) from error
        if facts.stopping:
            raise UsageError(STOPPING)
        changes, self.file = describe_changes(self.file, file), file
        found = {kind: changes[kind] for kind in CHANGE_KINDS if changes[kind]}
        facts.config_error, facts.config_loaded_unix_s = "", time.time()
        self.log.write("configuration read", models=changes["models"], **found)
        for name in {*changes["added"], *changes["changed"]} & file.argument_sources.keys():
            args = list(file.catalogue.launches[name].args)
            self.log.write(
                "arguments of a bundle", model=name, bundle=file.argument_sources[name] or None, args=args
            )
        return changes
