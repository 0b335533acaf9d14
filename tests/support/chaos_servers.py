"""Host whose servers need no model: real starter, supervisors and leases; each server is an API process with an engine process.

python -m support.chaos_servers host FILE [KEY] run a host with that file, and an API key
python -m support.chaos_servers DESCRIPTOR      the starter process

All are forked, so that a start takes milliseconds. The name of each process is its role. A stream has the tokens of
`fake_model`, one for each step of the engine, which stands still while the engine is stopped.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from aiohttp import web
from support import fake_model

from coldstart.host import configuration
from coldstart.host.live import run, servers, starter
from coldstart.host.live.log import Log
from coldstart.launch.server import stay
from coldstart.launch.server_process import ServerExitedError
from coldstart.system.ipc import json_lines
from coldstart.system.paths import Cache
from coldstart.system.proc import exits
from coldstart.system.proc.lifeline import SUPERVISOR_ENV, die_with_parent, die_with_supervisor

MODULE = "support.chaos_servers"
STEP_S = 0.02


class ChaosStarter(servers.Starter):
    """The real starter for the servers of this module."""

    module = MODULE


def host(file: Path, key: str | None = None) -> int:
    """Run a host on a free port until a signal, and print its URL."""
    run.Starter = ChaosStarter  # type: ignore[misc]
    options = run.HostOptions(Cache.at(), run.GatewayEndpoint(port=0, api_key=key), heartbeat_s=1.0)
    parsed = configuration.load(file)

    def announce(url: str, *_: object) -> None:
        print(url, flush=True)

    return run.ModelHost(parsed, lambda: parsed, options, Log(), announce).run()


@dataclass
class Forked:
    """A server process that this process has forked (ServerProcess)."""

    pid: int
    code: int | None = None

    def __post_init__(self) -> None:
        self._pidfd = os.pidfd_open(self.pid)

    def fileno(self) -> int:
        return self._pidfd

    def poll(self) -> int | None:
        return self.wait() if select.select([self], [], [], 0)[0] else None

    def wait(self) -> int:
        """Wait for its end, kill the rest of its session, and return 128 + n after signal n."""
        if self.code is None:
            select.select([self], [], [])
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self.code = code if code >= 0 else 128 - code
        return self.code

    def signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._pidfd, number)


def supervise(message: Mapping[str, Any], channel: json_lines.Channel) -> int:
    """Start and supervise one server as `starter.supervise` does."""
    channel.send({"process": os.getpid()})
    _name("supervisor")
    reader, writer = os.pipe()
    os.environ[str(SUPERVISOR_ENV)] = str(os.getpid())
    if (pid := os.fork()) == 0:
        channel.close()
        os.close(reader)
        _become_api(message["listen"][1], writer)
    os.close(writer)
    channel.send({"process": pid})
    server = Forked(pid)
    if not os.read(reader, 1):
        died = ServerExitedError(f"The server {exits.describe(server.wait())} before it was ready.")
        died.code = server.code
        raise died
    channel.send({"ready": {"mode": "fake", "pid": pid, "phases": {}, "fallbacks": []}})
    code = stay(server)
    return starter._send(channel, {"code": server.wait()}, code)


def _become_api(place: str, ready: int) -> NoReturn:
    os.setsid()
    die_with_supervisor()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _name("api")
    reader, writer = os.pipe()
    if os.fork() == 0:
        _step_forever(writer)
    os.close(writer)
    asyncio.run(Api().serve(place, reader, ready))
    os._exit(1)


def _step_forever(steps: int) -> NoReturn:
    """Report one step every STEP_S seconds until the API process ends."""
    die_with_parent(signal.SIGKILL)
    _name("engine")
    while True:
        os.write(steps, b"s")
        time.sleep(STEP_S)


def _name(role: str) -> None:
    Path("/proc/self/comm").write_text(role)


class Api:
    """API process of one server."""

    def __init__(self) -> None:
        self.steps = 0
        self.stepped = asyncio.Condition()

    async def serve(self, place: str, steps: int, ready: int) -> None:
        """Serve until the engine ends."""
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/health", self._healthy)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.UnixSite(runner, place, backlog=1024).start()
        os.write(ready, b"1")
        while await asyncio.to_thread(os.read, steps, 1):
            async with self.stepped:
                self.steps += 1
                self.stepped.notify_all()

    async def _healthy(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=f"vllm:steps {self.steps}\n")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for event in fake_model.events(body, f"cmpl-{os.getpid()}"):
            async with self.stepped:
                await self.stepped.wait()
            await answer.write(f"data: {json.dumps(event)}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        return answer


def main(role: str, *rest: str) -> None:
    """Run the host or its starter process."""
    if role == "host":
        sys.exit(host(Path(rest[0]), *rest[1:]))
    die_with_supervisor()
    _name("starter")
    starter.serve_forever(json_lines.Channel(socket.socket(fileno=int(role))), supervise)


if __name__ == "__main__":
    main(*sys.argv[1:])
