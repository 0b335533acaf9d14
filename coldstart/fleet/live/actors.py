"""Server actors: one on each node that serves, detached, so that the servers outlive the fleet's process.

Tokens do not pass through actors. The processes that a server actor started end with it: their leases end.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from coldstart.fleet.live.node import NodeServers
from coldstart.fleet.live.orders import NodeLostError, RankOrder
from coldstart.host.live.starter_client import Starter
from coldstart.host.running_hosts import own_directory
from coldstart.system import runtime
from coldstart.system.paths import Cache


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

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of NodeServers."""
        return await getattr(self._servers(), method)(*args)


@dataclass(frozen=True)
class RemoteNode:
    """Server actor in the form in which the fleet uses it."""

    actor: Any

    async def launch(self, order: RankOrder) -> None:
        """Implement Node: launch a rank."""
        await self._call("launch", order)

    async def pace(self, worker: str, rate: float | None) -> None:
        """Implement Node: set the rate of a worker's fetch."""
        await self._call("pace", worker, rate)

    async def stop(self, worker: str) -> None:
        """Implement Node: stop a worker."""
        await self._call("stop", worker)

    async def rendezvous(self) -> tuple[str, int]:
        """Implement Node: return an address and port for a rendezvous."""
        address, port = await self._call("rendezvous")
        return str(address), int(port)

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            return await self.actor.call.remote(method, *args)
        except RayError as error:
            raise NodeLostError(f"{type(error).__name__}") from error
