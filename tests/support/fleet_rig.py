"""Complete fleet in one event loop without Ray: its control and servers are real, the model servers are fakes.

A test can kill the fleet; the next one starts from the state file and the reports of the servers, as `fleet up` does.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from support.fake_upstream import FakeServers, serve

from coldstart.contract.arguments import Arguments
from coldstart.fleet.core import FleetCore
from coldstart.fleet.events import Action, Event
from coldstart.fleet.live import admin
from coldstart.fleet.live.control import FleetControl
from coldstart.fleet.live.node import NodeServers
from coldstart.fleet.live.orders import NodeLostError
from coldstart.fleet.live.state import FleetState, ModelDeployment
from coldstart.fleet.specification import Costs, FleetModel, FleetSettings, ServerSpec
from coldstart.host.endpoint import GatewayEndpoint
from coldstart.host.launches import Launch
from coldstart.host.live.app import Gateway

SETTINGS = FleetSettings(most_ranks=1, consolidate=False, backoff_s=0.02, backoff_max_s=0.05)
Decision = tuple[float, Event, list[Action]]
Recording = list[Decision]


def record_decisions(core: FleetCore, record: Callable[[Decision], object]) -> FleetCore:
    """Call `record` with the time, event and actions of each decision of a core."""
    decide = core.handle

    def handle(event: Event, now: float) -> list[Action]:
        actions = decide(event, now)
        record((now, event, actions))
        return actions

    core.handle = handle  # type: ignore[method-assign]
    return core


def deployment(name: str, *, words: tuple[str, ...] = (), **given: Any) -> ModelDeployment:
    """Return the deployment of a model that needs ten bytes on the device."""
    figures = {"batch": 2, "most": 2, "idle_s": 60.0, **given}
    return ModelDeployment(
        Launch(name, name, Arguments(words)), FleetModel(name, 10, 10, Costs(library_s=0.1), **figures)
    )


@dataclass
class RigNode:
    """A server; `away` as the fleet sees it."""

    spec: ServerSpec
    servers: FakeServers
    node: NodeServers
    away: bool = False
    heard: asyncio.Task[None] | None = None
    place: tuple[str, int] | None = None

    async def call(self, method: str, *args: Any) -> Any:
        if self.away:
            raise NodeLostError("away")
        return await getattr(self.node, method)(*args)


@dataclass
class FleetRig:
    """A fleet; `keys` are the client key and the admin key."""

    directory: Path
    keys: tuple[str, str] | None = None
    settings: FleetSettings = SETTINGS
    network: float = 1e9
    nodes: dict[str, RigNode] = field(default_factory=dict)
    recording: Recording = field(default_factory=list)
    url: str = ""

    async def begin(self, count: int = 2, memory: int = 10) -> None:
        for number in range(count):
            spec = ServerSpec(f"s{number}", memory, self.network, 1e9)
            servers = FakeServers(self.directory / spec.name)
            servers.directory.mkdir()
            self.nodes[spec.name] = RigNode(spec, servers, NodeServers("127.0.0.1", servers))
        await self.revive()

    async def down(self) -> None:
        self.control.close()

    async def kill(self) -> None:
        """Kill the fleet's process: its connections break, and the servers continue."""
        for node in self.nodes.values():
            if node.heard is not None:
                node.heard.cancel()
        self.control.close()
        self._server.stop(at_once=True)
        self._server.abort_connections()
        await asyncio.wait([self._serving])

    async def revive(self) -> None:
        """Start another process from the state file and the servers."""
        state = FleetState(self.directory / "state.json")
        self.control = control = FleetControl(self.settings, state)
        record_decisions(control.core, self.recording.append)
        reachable = [node for node in self.nodes.values() if not node.away]
        reports = [(node.spec, node, await node.node.report()) for node in reachable]
        control.rebuild(reports)
        for node, (_, _, report) in zip(reachable, reports, strict=True):
            node.heard = asyncio.get_running_loop().create_task(self._hear(control, node, report.seq))
        more = admin.create_routes(control, self.keys[1], self.down) if self.keys else []
        endpoint = GatewayEndpoint(port=0, api_key=self.keys[0] if self.keys else None)
        app = Gateway(control, heartbeat_s=0.05, endpoint=endpoint, more=more)
        self._server, self._serving, self.url = await serve(app)

    async def _hear(self, control: FleetControl, node: RigNode, after: int) -> None:
        while True:
            for number, event in await node.node.read_events(after):
                control.workers.process_event(event)
                after = number

    def servers(self) -> Iterator[Any]:
        """Return every model server that was started."""
        return (server for node in self.nodes.values() for server in node.servers.begun)

    def groups(self, phase: str = "serving") -> list[str]:
        return [group.name for group in self.control.core.groups.values() if group.phase == phase]


@dataclass
class FleetStage:
    """Rig with a client."""

    rig: FleetRig
    client: aiohttp.ClientSession

    @property
    def control(self) -> FleetControl:
        return self.rig.control

    async def ask(self, model: str, prompt: Any = "x", **body: Any) -> tuple[int, Any]:
        """Return status and document of a completion."""
        given = {"model": model, "prompt": prompt, **body}
        async with self.client.post(self.rig.url + "/v1/completions", json=given) as answer:
            return answer.status, await answer.json()

    async def events(self, model: str, prompt: Any = "x", **body: Any) -> list[bytes]:
        """Return the non-empty lines of a stream."""
        given = {"model": model, "prompt": prompt, "stream": True, **body}
        async with self.client.post(self.rig.url + "/v1/completions", json=given) as answer:
            return [line.rstrip() async for line in answer.content if line.strip()]

    def deploy(self, made: ModelDeployment) -> None:
        self.control.deploy(made)


@asynccontextmanager
async def fleet(
    directory: Path,
    count: int = 2,
    memory: int = 10,
    *,
    keys: tuple[str, str] | None = None,
    settings: FleetSettings = SETTINGS,
    network: float = 1e9,
) -> AsyncIterator[FleetStage]:
    """Yield a fleet of `count` servers with `memory` bytes each; `keys` are the client key and the admin key."""
    rig = FleetRig(directory, keys, settings, network)
    await rig.begin(count, memory)
    try:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as client:
            yield FleetStage(rig, client)
    finally:
        await rig.kill()
        for node in rig.nodes.values():
            await node.node.clear()
