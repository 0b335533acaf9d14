"""Connection of the gateway to Ray, and discovery of the Ray nodes whose labels describe a server.

One detached actor runs on each serving node, so that servers survive a restart of the gateway. The tokens of streams do
not pass through actors. When an actor exits, the processes that it started exit too.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import ray
from ray._private.state import jobs
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coldstart.errors import CommandFailedError, UsageError
from coldstart.fleet.live import ray_process
from coldstart.fleet.live.control import FleetControl
from coldstart.fleet.live.node import NodeServers
from coldstart.fleet.live.orders import NodeLostError, NodeReport
from coldstart.fleet.specification import ServerSpec
from coldstart.host.live.servers import ServerStarter, create_host_directory
from coldstart.system import runtime
from coldstart.system.paths import Cache


def _load_starter_class(named: str | None) -> type[ServerStarter]:
    """Return the class `named`, which a test writes as `module:name`, or ServerStarter if `named` is None."""
    if named is None:
        return ServerStarter
    module, _, name = named.partition(":")
    return getattr(import_module(module), name)  # type: ignore[no-any-return]


def _read_node_environment() -> dict[str, str]:
    """Return the variables with which the node started, without those of Ray and the OpenMP thread limit that Ray adds."""
    begun = Path("/proc/self/environ").read_bytes().split(b"\0")
    names = {os.fsdecode(one.partition(b"=")[0]) for one in begun}
    return {name: os.environ[name] for name in names & os.environ.keys() if not name.startswith("RAY_")}


@ray.remote
class ServerActor:
    """Ray actor that runs the model servers of its node."""

    def __init__(self, host: str, options: dict[str, Any]) -> None:
        self._host, self._options = host, options
        self._stack = ExitStack()
        self._node: NodeServers | None = None

    def _servers(self) -> NodeServers:
        """Return the servers of the node. The first call creates them in the event loop that later calls use."""
        if self._node is None:
            starter_class = _load_starter_class(self._options.get("servers"))
            offline = bool(self._options.get("offline"))
            # A failure here is repeated by each call, so each one must remove its directory.
            with ExitStack() as stack:
                directory = stack.enter_context(create_host_directory())
                starter = starter_class(directory, Cache.at(), offline=offline, env=_read_node_environment())
                starter.start_process()
                self._node = NodeServers(self._host, starter, selects_device=not runtime.targets_cpu())
                self._stack = stack.pop_all()
        return self._node

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the node's NodeServers, and return its result."""
        return await getattr(self._servers(), method)(*args)


@dataclass(frozen=True)
class RemoteNode:
    """Client of a server actor. `place` is the host and port on which Ray listens on the node."""

    actor: Any
    place: tuple[str, int] | None = None

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the actor's NodeServers, and return its result. Raises NodeLostError if the actor is unreachable."""
        try:
            return await self.actor.call.remote(method, *args)
        except RayError as error:
            raise NodeLostError(f"the Ray call {method} failed with {type(error).__name__}") from error


NAMESPACE, GATEWAY, SERVER = "coldstart", "gateway", "server-"
CONNECT_TIMEOUT_S = 120.0
POLL_S = 1.0
REPORT_TIMEOUT_S = 30.0
"""Seconds for which a new gateway waits for the servers' reports."""


@contextmanager
def connect_to_ray(address: str) -> Iterator[None]:
    """Connect to the Ray cluster at `address` for the duration of the block, waiting up to CONNECT_TIMEOUT_S seconds for it.

    Raises:
        CommandFailedError: The cluster cannot be reached, or it already has a gateway.
    """
    end = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
            break
        except (ConnectionError, RuntimeError, ValueError) as error:
            if time.monotonic() > end:
                raise CommandFailedError(
                    f"cannot reach Ray at {address}: {error}",
                    hint="run `coldstart fleet up --address HOST:PORT` with the address of a running cluster",
                ) from error
            with suppress(Exception):
                ray.shutdown()
            time.sleep(0.5)
    try:
        _become_gateway(address)
        yield
    finally:
        ray.shutdown()


def _become_gateway(address: str) -> None:
    """Register this process as the gateway. Raises CommandFailedError if the registered gateway is still running."""
    known = _internal_kv_get(GATEWAY, namespace=NAMESPACE)
    for job in jobs():
        if job["JobID"].encode() == known and not job["IsDead"]:
            raise CommandFailedError(
                f"the fleet of the Ray cluster at {address} already has a gateway: process {job['DriverPid']} on "
                f"{job['DriverIPAddress']}",
                hint="run `coldstart fleet down` to stop this gateway",
            )
    _internal_kv_put(GATEWAY, ray.get_runtime_context().get_job_id(), overwrite=True, namespace=NAMESPACE)


class Membership:
    """Servers of a fleet in Ray. This class detects servers that join or are lost, and forwards the events of each server."""

    def __init__(self, control: FleetControl, options: dict[str, Any]) -> None:
        self._control, self._options = control, options
        self._here, self._here_alive = ray.get_runtime_context().get_node_id(), True
        self._nodes: dict[str, RemoteNode] = {}
        self._followed: dict[str, asyncio.Task[None]] = {}
        self._node_updates: asyncio.Queue[dict[str, tuple[ServerSpec, RemoteNode]]] = asyncio.Queue()

    async def recover(self) -> None:
        """Rebuild the fleet's state from the servers' reports, waiting up to REPORT_TIMEOUT_S seconds for them."""
        nodes = await asyncio.to_thread(self._list_servers)
        reports = await asyncio.gather(*(self._request_report(node.actor) for _, node in nodes.values()))
        found = dict(zip(nodes, reports, strict=True))
        self._control.rebuild(
            (spec, node, report)
            for name, (spec, node) in nodes.items()
            if (report := found[name]) is not None
        )
        for name, (spec, node) in nodes.items():
            self._nodes[name] = node
            self._follow(spec, found[name])

    async def _request_report(self, actor: Any) -> NodeReport | None:
        with suppress(RayError, TimeoutError):
            return await asyncio.wait_for(actor.call.remote("report"), REPORT_TIMEOUT_S)
        return None

    def _list_servers(self) -> dict[str, tuple[ServerSpec, RemoteNode]]:
        """Return the live nodes that are servers, with their actors. Blocks while Ray does not respond."""
        found = {}
        for node in ray.nodes():
            if not node["Alive"]:
                self._here_alive &= node["NodeID"] != self._here
                continue
            name = f"{node['NodeManagerHostname']}-{node['NodeID'][:8]}"
            try:
                spec = ray_process.parse_labels(name, node.get("Labels", {}))
            except UsageError as error:
                self._control.log.write("node refused", node=name, reason=error.message)
                continue
            if spec is not None:
                place = str(node["NodeManagerAddress"]), int(node["NodeManagerPort"])
                found[name] = spec, RemoteNode(self._get_actor(node), place)
        return found

    def _get_actor(self, node: dict[str, Any]) -> Any:
        return ServerActor.options(  # type: ignore[attr-defined]
            name=SERVER + node["NodeID"],
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            # With soft affinity Ray could place the actor on another server.
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        ).remote(node["NodeManagerAddress"], self._options)

    async def watch(self) -> None:
        """Add nodes that join, and remove lost nodes. Return when Ray has exited on this machine."""
        loop = asyncio.get_running_loop()
        # A daemon thread does not delay the exit of the process while Ray does not respond.
        threading.Thread(target=self._poll_nodes, args=(loop,), daemon=True).start()
        while self._here_alive:
            nodes = await self._node_updates.get()
            self._nodes |= {name: node for name, (_, node) in nodes.items()}
            for name in [name for name in self._followed if name not in nodes]:
                self._followed.pop(name).cancel()
                del self._nodes[name]
                self._control.lose_server(name)
            for name, (spec, _) in nodes.items():
                if name not in self._followed:
                    self._follow(spec, None)

    def _poll_nodes(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            time.sleep(POLL_S)
            if loop.is_closed():
                return
            try:
                nodes = self._list_servers()
            except Exception as error:  # noqa: BLE001 - retry after any error in Ray
                self._control.log.write("nodes not seen", reason=f"{type(error).__name__}: {error}")
                continue
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(self._node_updates.put_nowait, nodes)

    def _follow(self, spec: ServerSpec, report: NodeReport | None) -> None:
        task = asyncio.get_running_loop().create_task(follow_server(self._control, spec, self._nodes, report))
        self._followed[spec.name] = task


async def follow_server(
    control: FleetControl, spec: ServerSpec, nodes: Mapping[str, RemoteNode], report: NodeReport | None
) -> None:
    """Forward the events of a server to `control`.

    An unreachable server counts as lost, and rejoins without workers once it can be reached. Each attempt reads the actor
    from `nodes` again, because Ray may have replaced an actor that it could not place.
    """
    while True:
        node = nodes[spec.name]
        actor = node.actor
        try:
            if report is None:
                report = await actor.call.remote("report")
                if report.workers:
                    # The server kept running while it counted as lost, and its requests went elsewhere.
                    await actor.call.remote("clear")
                    report = await actor.call.remote("report")
                control.add_server(spec, node)
            after = report.seq
            while True:
                for number, event in await actor.call.remote("read_events", after):
                    control.workers.process_event(event)
                    after = number
        except RayError as error:
            # Report the cause, not Ray's description of its location.
            cause = getattr(error, "cause", None)
            control.mark_unusable(spec.name, str(cause) if cause is not None else type(error).__name__)
            report = None
            await asyncio.sleep(POLL_S / 2)


def stop_all_servers() -> None:
    """Kill the server actors and all their model servers."""
    for one in ray.util.list_named_actors(all_namespaces=True):
        if one["namespace"] == NAMESPACE and one["name"].startswith(SERVER):
            with suppress(ValueError, RayError):
                ray.kill(ray.get_actor(one["name"], namespace=NAMESPACE), no_restart=True)
