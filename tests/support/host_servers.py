"""Host whose servers need no model: real starter, supervisors and leases; each server is an API process with an engine process.

python -m support.host_servers host FILE KEY  run a host with that file and an API key
python -m support.host_servers DESCRIPTOR     the starter process

All are forked, so that a start takes milliseconds. The name of each process is its role. A stream has the tokens of
`fake_model`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from aiohttp import web
from support import fake_model

from coldstart.host import configuration
from coldstart.host.live import run, servers, starter
from coldstart.host.live.log import Log
from coldstart.system.ipc import json_lines
from coldstart.system.paths import Cache
from coldstart.system.proc.lifeline import SUPERVISOR_ENV, die_with_parent, die_with_supervisor


class HostStarter(servers.Starter):
    """The real starter for the servers of this module."""

    module = "support.host_servers"


def host(file: Path, key: str) -> int:
    """Run a host on a free port until a signal, and print its URL."""
    run.Starter = HostStarter  # type: ignore[misc]
    options = run.HostOptions(Cache.at(), run.GatewayEndpoint(port=0, api_key=key), heartbeat_s=1.0)
    parsed = configuration.load(file)

    def announce(url: str, *_: object) -> None:
        print(url, flush=True)

    return run.ModelHost(parsed, lambda: parsed, options, Log(), announce).run()


def supervise(message: Mapping[str, Any], channel: json_lines.Channel) -> int:
    """Start and supervise one server as `starter.supervise` does."""
    channel.send({"process": os.getpid()})
    _name("supervisor")
    reader, writer = os.pipe()
    os.environ[str(SUPERVISOR_ENV)] = str(os.getpid())
    if (pid := os.fork()) == 0:
        channel.close()
        _become_api(message["listen"][1], writer)
    channel.send({"process": pid})
    os.read(reader, 1)
    channel.send({"ready": {"mode": "fake", "pid": pid, "phases": {}, "fallbacks": []}})
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _become_api(place: str, ready: int) -> NoReturn:
    die_with_supervisor()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _name("api")
    if os.fork() == 0:
        die_with_parent(signal.SIGKILL)
        _name("engine")
        signal.pause()
    asyncio.run(_serve(place, ready))
    os._exit(1)


def _name(role: str) -> None:
    Path("/proc/self/comm").write_text(role)


async def _serve(place: str, ready: int) -> None:
    app = web.Application()
    app.router.add_post("/v1/completions", _complete)
    app.router.add_get("/{path:health|metrics}", _observed)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, place).start()
    os.write(ready, b"1")
    await asyncio.Event().wait()


async def _observed(_: web.Request) -> web.Response:
    return web.Response()


async def _complete(request: web.Request) -> web.StreamResponse:
    body = json.loads(await request.read())
    answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await answer.prepare(request)
    for event in fake_model.events(body, f"cmpl-{os.getpid()}"):
        await answer.write(f"data: {json.dumps(event)}\n\n".encode())
    await answer.write(b"data: [DONE]\n\n")
    return answer


def main(role: str, *rest: str) -> None:
    """Run the host or its starter process."""
    if role == "host":
        sys.exit(host(Path(rest[0]), rest[1]))
    die_with_supervisor()
    _name("starter")
    starter.serve_forever(json_lines.Channel(socket.socket(fileno=int(role))), supervise)


if __name__ == "__main__":
    main(*sys.argv[1:])
