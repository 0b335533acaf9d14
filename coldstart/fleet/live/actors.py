"""Ray actors of the fleet: the controller and the server actors.

One detached controller is restarted on its node. Every node whose labels describe a server has one server actor.
Tokens do not pass through actors. The processes that a server actor started end with it: their leases end.
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
from coldstart.host.live.starter_client import Starter
from coldstart.host.running_hosts import own_directory
from coldstart.system import runtime
from coldstart.system.paths import Cache

NAMESPACE, CONTROLLER, SERVER = "coldstart", "controller", "server-"
LOOK_S = 1.0
FIRST_S = 30.0
"""Time in seconds that a new controller waits for the reports of the servers."""


def _servers(named: str | None) -> type[Starter]:
    """Return the factory of servers: Starter, or the class that a test names as module:name."""
    if named is None:
        return Starter
    module, _, name = named.partition(":")
    return getattr(import_module(module), name)  # type: ignore[no-any-return]


def _environment() -> dict[str, str]:
    """Return the node's environment without Ray's token and without the single OpenMP thread that Ray sets for this actor."""
    begun = Path("/proc/self/environ").read_bytes().split(b"\0")
    names = {os.fsdecode(one.partition(b"=")[0]) for one in begun}
    return {name: os.environ[name] for name in names & os.environ.keys() if not name.startswith("RAY_")}


@ray.remote
class ServerActor:
    """Actor for the model servers of its node."""

    def __init__(self, host: str, options: dict[str, Any]) -> None:
        self._host, self._options = host, options
        self._stack = ExitStack()
        self._node: NodeServers | None = None

    def _servers(self) -> NodeServers:
        """Return the node's servers, created by the first call: they belong to the event loop and thread of the calls."""
        if self._node is None:
            made = _servers(self._options.get("servers"))
            offline = bool(self._options.get("offline"))
            # If this fails it is repeated with each call: remove the directory each time.
            with ExitStack() as stack:
                directory = stack.enter_context(own_directory())
                starter = made(directory, Cache.at(), offline=offline, env=_environment())
                starter.warm()
                self._node = NodeServers(self._host, starter, shows_devices=not runtime.targets_cpu())
                self._stack = stack.pop_all()
        return self._node

    async def report(self) -> NodeReport:
        """Return the report of NodeServers."""
        return self._servers().report()

    async def heard(self, after: int) -> list[tuple[int, WorkerEvent]]:
        """Return the next worker events of NodeServers."""
        return await self._servers().heard(after)

    async def launch(self, order: RankOrder) -> None:
        """Call NodeServers: launch a rank."""
        await self._servers().launch(order)

    async def pace(self, worker: str, rate: float | None) -> None:
        """Call NodeServers: set the rate of a worker's fetch."""
        await self._servers().pace(worker, rate)

    async def stop(self, worker: str) -> None:
        """Call NodeServers: stop a worker."""
        await self._servers().stop(worker)

    async def rendezvous(self) -> tuple[str, int]:
        """Call NodeServers: return an address and port for a rendezvous."""
        return await self._servers().rendezvous()

    async def clear(self) -> int:
        """Call NodeServers: stop all workers; return this process's id."""
        await self._servers().clear()
        return os.getpid()


@dataclass(frozen=True)
class RemoteNode:
    """Server actor in the form in which the controller uses it."""

    actor: Any

    async def launch(self, order: RankOrder) -> None:
        """Implement Node: launch a rank."""
        await _asked(self.actor.launch.remote(order))

    async def pace(self, worker: str, rate: float | None) -> None:
        """Implement Node: set the rate of a worker's fetch."""
        await _asked(self.actor.pace.remote(worker, rate))

    async def stop(self, worker: str) -> None:
        """Implement Node: stop a worker."""
        await _asked(self.actor.stop.remote(worker))

    async def rendezvous(self) -> tuple[str, int]:
        """Implement Node: return an address and port for a rendezvous."""
        address, port = await _asked(self.actor.rendezvous.remote())
        return str(address), int(port)


async def _asked(reference: Any) -> Any:
    """Return the actor's reply. Raises NodeLostError."""
    try:
        return await reference
    except RayError as error:
        raise NodeLostError(f"{type(error).__name__}") from error


@ray.remote
class ControllerActor:
    """Actor of the controller.

    `options`: state and record (paths or null), settings (as `wire` encodes them), offline, servers.
    """

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
            return spec, await asyncio.wait_for(actor.report.remote(), FIRST_S)
        return spec, None

    async def _nodes(self) -> dict[str, tuple[ServerSpec, Any]]:
        """Return the living nodes that are servers, each with its actor."""
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
        """Watch for nodes that join or are lost."""
        while True:
            await asyncio.sleep(LOOK_S)
            control.calls.forget_lost()
            try:
                nodes = await self._nodes()
            except Exception as error:  # noqa: BLE001 - after any error of Ray, nodes are looked for again
                Log().say("nodes not seen", reason=f"{type(error).__name__}: {error}")
                continue
            self._actors |= {name: actor for name, (_, actor) in nodes.items()}
            for name in [name for name in self._followed if name not in nodes]:
                self._followed.pop(name).cancel()
                del self._actors[name]
                control.lose_server(name)
            for name, (spec, _) in nodes.items():
                if name not in self._followed:
                    self._follow(control, spec, None)

    def _follow(self, control: FleetControl, spec: ServerSpec, report: NodeReport | None) -> None:
        task = asyncio.get_running_loop().create_task(followed(control, spec, self._actors, report))
        self._followed[spec.name] = task

    async def call(self, document: Any) -> Any:
        """Answer one call; calls that do not wait are processed in order of arrival."""
        return await calls.answer(await self._control(), document)


async def followed(
    control: FleetControl, spec: ServerSpec, actors: Mapping[str, Any], report: NodeReport | None
) -> None:
    """Forward the events of a server to the controller.

    A server that cannot be reached is lost; when it can be reached again it joins without workers. The actor is read
    from `actors` on each attempt: an actor that Ray could not place, because its new node was not yet known
    everywhere, is dead, and a replacement has its name.
    """
    while True:
        actor = actors[spec.name]
        try:
            if report is None:
                report = await actor.report.remote()
                if report.workers:
                    # It continued to run while it was counted as lost: its requests have moved to other
                    # servers.
                    await actor.clear.remote()
                    report = await actor.report.remote()
                control.joined(spec, RemoteNode(actor))
            after = report.seq
            while True:
                for number, event in await actor.heard.remote(after):
                    control.process_event(event)
                    after = number
        except RayError as error:
            # Report the cause, not Ray's description of its location.
            cause = getattr(error, "cause", None)
            control.unreached(spec.name, str(cause) if cause is not None else type(error).__name__)
            report = None
            await asyncio.sleep(LOOK_S / 2)


def _recorder(path: str | None) -> Any:
    """Return a function that writes each event and its actions as a line of JSON for a replay, or None."""
    if path is None:
        return None
    file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 - as long as the actor

    def record(now: float, event: Any, actions: list[Any]) -> None:
        line = {"now": now, "event": wire.document(event), "actions": wire.document(actions)}
        file.write(json.dumps(line) + "\n")
        file.flush()

    return record


def end_all() -> list[str]:
    """End every actor of the fleet, the controller first so that it starts nothing more; return their names."""
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
