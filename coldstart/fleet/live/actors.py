"""The fleet's two kinds of Ray actors, and nothing but what makes them actors.

One controller, detached, that starts again wherever its node is; one server actor on every node whose labels say that it is a
server. Neither carries a token of any answer. What a server actor started ends with it: its leases end, and the kernel says so.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coldstart.errors import UsageError
from coldstart.fleet import labels
from coldstart.fleet.live import calls, wire
from coldstart.fleet.live.control import FleetControl
from coldstart.fleet.live.node import NodeServers
from coldstart.fleet.live.orders import NodeLostError, NodeReport, RankOrder, WorkerEvent
from coldstart.fleet.live.state import FleetState
from coldstart.fleet.specification import FleetSettings, ServerSpec
from coldstart.host.live.log import Log
from coldstart.host.live.run import own_directory
from coldstart.host.live.servers import Starter
from coldstart.system import runtime
from coldstart.system.paths import Cache

NAMESPACE, CONTROLLER, SERVER = "coldstart", "controller", "server-"
LOOK_S = 1.0
FIRST_S = 30.0
"""So long a controller that has started waits for what the servers of living nodes have."""


def _servers(named: str | None) -> type[Starter]:
    """What begins servers: ours, or what a test names as module:name."""
    if named is None:
        return Starter
    module, _, name = named.partition(":")
    return getattr(import_module(module), name)  # type: ignore[no-any-return]


def _environment() -> dict[str, str]:
    """The node's own: without Ray's token, and without the one OpenMP thread that Ray gives an actor without processors."""
    begun = Path("/proc/self/environ").read_bytes().split(b"\0")
    names = {os.fsdecode(one.partition(b"=")[0]) for one in begun}
    return {name: os.environ[name] for name in names & os.environ.keys() if not name.startswith("RAY_")}


@ray.remote
class ServerActor:
    """The model servers of its node."""

    def __init__(self, host: str, options: dict[str, Any]) -> None:
        self._host, self._options = host, options
        self._stack = ExitStack()
        self._node: NodeServers | None = None

    def _servers(self) -> NodeServers:
        """Made by the first call: what is here belongs to the loop that runs the calls, and to its thread."""
        if self._node is None:
            made = _servers(self._options.get("servers"))
            offline = bool(self._options.get("offline"))
            # Asked again and again where it cannot be made: each time its directory goes with it.
            with ExitStack() as stack:
                directory = stack.enter_context(own_directory())
                starter = made(directory, Cache.at(), offline=offline, env=_environment())
                starter.warm()
                self._node = NodeServers(self._host, starter, shows_devices=not runtime.targets_cpu())
                self._stack = stack.pop_all()
        return self._node

    async def found(self) -> NodeReport:
        """As NodeServers."""
        return self._servers().found()

    async def heard(self, after: int) -> list[tuple[int, WorkerEvent]]:
        """As NodeServers."""
        return await self._servers().heard(after)

    async def launch(self, order: RankOrder) -> None:
        """As NodeServers."""
        await self._servers().launch(order)

    async def pace(self, worker: str, rate: float | None) -> None:
        """As NodeServers."""
        await self._servers().pace(worker, rate)

    async def stop(self, worker: str) -> None:
        """As NodeServers."""
        await self._servers().stop(worker)

    async def rendezvous(self) -> tuple[str, int]:
        """As NodeServers."""
        return await self._servers().rendezvous()

    async def clear(self) -> int:
        """As NodeServers; this process's id."""
        await self._servers().clear()
        return os.getpid()


@dataclass(frozen=True)
class RemoteNode:
    """A server actor as the controller orders it about."""

    actor: Any

    async def launch(self, order: RankOrder) -> None:
        """As Node."""
        await _asked(self.actor.launch.remote(order))

    async def pace(self, worker: str, rate: float | None) -> None:
        """As Node."""
        await _asked(self.actor.pace.remote(worker, rate))

    async def stop(self, worker: str) -> None:
        """As Node."""
        await _asked(self.actor.stop.remote(worker))

    async def rendezvous(self) -> tuple[str, int]:
        """As Node."""
        address, port = await _asked(self.actor.rendezvous.remote())
        return str(address), int(port)


async def _asked(reference: Any) -> Any:
    """What the actor answers. Raises NodeLostError."""
    try:
        return await reference
    except RayError as error:
        raise NodeLostError(f"{type(error).__name__}") from error


@ray.remote
class ControllerActor:
    """The controller. `options`: state and record (paths or null), settings (as wire has them), offline, servers."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._begun: asyncio.Task[FleetControl] | None = None
        self._actors: dict[str, Any] = {}
        self._followed: dict[str, asyncio.Task[None]] = {}
        self._look: asyncio.Task[None] | None = None

    async def _control(self) -> FleetControl:
        if self._begun is None:
            self._begun = asyncio.get_running_loop().create_task(self._begin())
        return await asyncio.shield(self._begun)

    async def _begin(self) -> FleetControl:
        settings = wire.thing(self._options["settings"])
        assert isinstance(settings, FleetSettings)
        path = self._options["state"]
        state = FleetState(Path(path) if path else None)
        control = FleetControl(settings, state, log=Log(), record=_recorder(self._options.get("record")))
        nodes = await self._nodes()
        found = await asyncio.gather(*(self._first(spec, actor) for spec, actor in nodes.values()))
        known = {spec.name: report for spec, report in found if report is not None}
        control.rebuild(
            (spec, RemoteNode(actor), known[name]) for name, (spec, actor) in nodes.items() if name in known
        )
        for name, (spec, actor) in nodes.items():
            self._actors[name] = actor
            self._follow(control, spec, known.get(name))
        self._look = asyncio.get_running_loop().create_task(self._watch(control))
        return control

    async def _first(self, spec: ServerSpec, actor: Any) -> tuple[ServerSpec, NodeReport | None]:
        with suppress(RayError, TimeoutError):
            return spec, await asyncio.wait_for(actor.found.remote(), FIRST_S)
        return spec, None

    async def _nodes(self) -> dict[str, tuple[ServerSpec, Any]]:
        """Nodes that live and are servers, each with its actor."""
        found = {}
        for node in await asyncio.to_thread(ray.nodes):
            if not node["Alive"]:
                continue
            name = f"{node['NodeManagerHostname']}-{node['NodeID'][:8]}"
            try:
                spec = labels.server(name, node.get("Labels", {}))
            except UsageError as error:
                Log().say("node refused", node=name, reason=error.message)
                continue
            if spec is not None:
                found[name] = spec, self._actor(node)
        return found

    def _actor(self, node: dict[str, Any]) -> Any:
        return ServerActor.options(  # type: ignore[attr-defined]
            name=SERVER + node["NodeID"],
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            # Not soft: on another node it would be another server.
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        ).remote(node["NodeManagerAddress"], self._options)

    async def _watch(self, control: FleetControl) -> None:
        """Nodes come and go."""
        while True:
            await asyncio.sleep(LOOK_S)
            control.calls.forget_lost()
            try:
                nodes = await self._nodes()
            except Exception as error:  # noqa: BLE001 - whatever Ray raises, nodes are looked for again
                Log().say("nodes not seen", reason=f"{type(error).__name__}: {error}")
                continue
            self._actors |= {name: actor for name, (_, actor) in nodes.items()}
            for name in [name for name in self._followed if name not in nodes]:
                self._followed.pop(name).cancel()
                del self._actors[name]
                control.lost(name)
            for name, (spec, _) in nodes.items():
                if name not in self._followed:
                    self._follow(control, spec, None)

    def _follow(self, control: FleetControl, spec: ServerSpec, report: NodeReport | None) -> None:
        task = asyncio.get_running_loop().create_task(followed(control, spec, self._actors, report))
        self._followed[spec.name] = task

    async def call(self, document: Any) -> Any:
        """Answer one call; calls that wait for nothing are processed in the order in which they came."""
        return await calls.answer(await self._control(), document)


async def followed(
    control: FleetControl, spec: ServerSpec, actors: Mapping[str, Any], report: NodeReport | None
) -> None:
    """Hear what the server says. One that cannot be reached is lost, and joins anew, emptied, when it can.

    By the actor that `actors` has for it now: one that Ray could not place, since a node that has just come was not known
    everywhere, is dead for good, and another has its name by then.
    """
    while True:
        actor = actors[spec.name]
        try:
            if report is None:
                report = await actor.found.remote()
                if report.workers:
                    # It ran on while it was given up: whoever was there has gone elsewhere.
                    await actor.clear.remote()
                    report = await actor.found.remote()
                control.joined(spec, RemoteNode(actor))
            after = report.seq
            while True:
                for number, event in await actor.heard.remote(after):
                    control.said(event)
                    after = number
        except RayError as error:
            # What it raised, not Ray's account of where.
            cause = getattr(error, "cause", None)
            control.unreached(spec.name, str(cause) if cause is not None else type(error).__name__)
            report = None
            await asyncio.sleep(LOOK_S / 2)


def _recorder(path: str | None) -> Any:
    """Writes each event with what followed as a line of JSON, for a replay."""
    if path is None:
        return None
    file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 - as long as the actor

    def record(now: float, event: Any, actions: list[Any]) -> None:
        line = {"now": now, "event": wire.document(event), "actions": wire.document(actions)}
        file.write(json.dumps(line) + "\n")
        file.flush()

    return record


def end_all() -> list[str]:
    """End every actor of the fleet, the controller first, so that nothing is started any more; their names."""
    named = [
        one["name"]
        for one in ray.util.list_named_actors(all_namespaces=True)
        if one["namespace"] == NAMESPACE
    ]
    ours = [name for name in named if name == CONTROLLER or name.startswith(SERVER)]
    for name in sorted(ours, key=lambda one: one != CONTROLLER):
        with suppress(ValueError, RayError):
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
    return ours
