"""A host with fake servers in this process: its real socket, signals, configuration file and event loop."""

import asyncio
import io
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from support.fake_upstream import TWO, FakeServers, wait_until

from coldstart.host import configuration, status
from coldstart.host.core import Core
from coldstart.host.endpoint import GatewayEndpoint
from coldstart.host.events import ModelFailed, ModelReady, RequestArrived, RequestEnded
from coldstart.host.live import run as running
from coldstart.host.live.log import Log
from coldstart.host.live.run import ModelHost
from coldstart.host.specification import HostSettings, ModelSpec
from coldstart.host.status import HostFacts
from coldstart.system.paths import Cache


class Served:
    """Host with fake servers on a free port in this process."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, **endpoint: Any) -> None:
        self.file, self.said = directory / "host.toml", io.StringIO()
        self.write(memory=15)
        self.servers = FakeServers(directory)
        self.servers.start_process = lambda: None  # type: ignore[attr-defined]
        monkeypatch.setattr(running, "ServerStarter", lambda *_, **__: self.servers)
        self.urls: list[str] = []
        self.host = ModelHost(
            configuration.load(self.file),
            lambda: configuration.load(self.file),
            Cache(directory),
            Log(self.said),
            lambda url, *_: self.urls.append(url),
            GatewayEndpoint(port=0, **endpoint),
            self.file,
        )

    def write(self, **limits: Any) -> None:
        own = {"policy": "lru", "runtime_template": False}
        lines = [f"{name} = {json.dumps(value)}" for name, value in {**own, **limits}.items()]
        models = [f"[models.{name}]\nmemory = 10\nstart_s = 1.0" for name in TWO]
        made = self.file.with_suffix(".new")
        made.write_text("\n".join([*lines, *models]) + "\n")
        made.replace(self.file)

    def run(self, work: Any) -> int:
        """Run the host with `work` and return the host's exit code."""
        inside = self.host._main

        async def both(sock: socket.socket, directory: Path) -> None:
            hosting = asyncio.create_task(inside(sock, directory))
            await wait_until(lambda: self.urls)
            await work(self)
            await hosting

        self.host._main = both  # type: ignore[method-assign]
        return self.host.run()

    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in self.said.getvalue().splitlines()]


NAME = "org/<b>a</b> $$x$$"


def build_status(name: str = NAME) -> dict[str, Any]:
    """Return the status of a host with a serving model of this name and a failed one."""
    core = Core(
        [
            ModelSpec.with_two_tiers(name, 10 << 30, 5.0, prewarm="0 8 * * 1-5"),
            ModelSpec.with_two_tiers("b", 1 << 30, 7.0),
        ],
        HostSettings(memory=15 << 30, policy="lru"),
    )
    facts = HostFacts(url="http://127.0.0.1:8000", pid=7, version="1.2.3")
    core.handle(RequestArrived("1", name), 2.0)
    core.handle(ModelReady(name, 3.0), 5.0)
    facts.get_model(name).gpu_memory_bytes = 9 << 30
    facts.get_model(name).next_prewarm_unix_s = 1e9
    facts.get_model(name).last_start = {
        **{"at_unix_s": 1e9, "mode": "snapshot", "seconds": 3.25, "fallbacks": [], "spans": []},
        "phases": {"import </script>": 1.0, "load weights": 2.0},
    }
    core.handle(RequestArrived("2", "b"), 5.5)
    core.handle(RequestEnded("1"), 6.0)
    core.handle(ModelFailed("b", "it fell <i>over</i>"), 7.0)
    return status.build_status(core, facts, 8.0, 1e9)
