"""A host with fake servers in this process: its real socket, signals, configuration file and event loop."""

import asyncio
import io
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from support.fake_upstream import TWO, FakeServers, wait_until

from coldstart.host import configuration
from coldstart.host.endpoint import GatewayEndpoint
from coldstart.host.live import run as running
from coldstart.host.live.log import Log
from coldstart.host.live.run import ModelHost
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
