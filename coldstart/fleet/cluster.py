"""Servers of a fleet: free device memory, bandwidth reservations, and weights cached in host memory.

Invariant: on each device, free memory and the memory of workers add up to its size; a lost server holds no memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator

from coldstart.fleet.reservations import BandwidthReservations
from coldstart.fleet.sizing import Offer
from coldstart.fleet.specification import ServerSpec


class FleetServer:
    """State of one server."""

    def __init__(self, spec: ServerSpec, now: float) -> None:
        self.spec, self.draining = spec, False
        self.free = [spec.memory] * spec.devices
        self.reservations = BandwidthReservations(spec.network, now)
        self.cached: OrderedDict[str, int] = OrderedDict()

    def offer(self, now: float) -> Offer:
        fetch = 0.0 if self.draining else self.reservations.offer(now)
        return Offer(self.spec.name, fetch, self.spec.load, max(self.free))

    def take(self, memory: int) -> int:
        """Allocate `memory` bytes on the device with the least sufficient free memory; return its number.

        Raises:
            ValueError: No device has enough free memory.
        """
        fitting = [(free, number) for number, free in enumerate(self.free) if free >= memory]
        if not fitting:
            raise ValueError(f"no device of {self.spec.name} has {memory} bytes free")
        device = min(fitting)[1]
        self.free[device] -= memory
        return device

    def give(self, device: int, memory: int) -> None:
        self.free[device] += memory

    def remember(self, model: str, size: int) -> None:
        """Cache the weights in host memory; evict the least recently used weights if they do not fit."""
        if size > self.spec.host_memory:
            return
        self.cached.pop(model, None)
        self.cached[model] = size
        while sum(self.cached.values()) > self.spec.host_memory:
            self.cached.popitem(last=False)

    def recall(self, model: str) -> bool:
        """Return whether the weights are in host memory, and mark them as used."""
        if model not in self.cached:
            return False
        self.cached.move_to_end(model)
        return True


class Cluster:
    """Servers by name, in the order in which they joined."""

    def __init__(self) -> None:
        self.servers: dict[str, FleetServer] = {}

    def join(self, spec: ServerSpec, now: float) -> None:
        self.servers[spec.name] = FleetServer(spec, now)

    def lose(self, name: str) -> None:
        self.servers.pop(name, None)

    def open(self, avoided: Collection[str] = ()) -> Iterator[FleetServer]:
        return (
            server
            for server in self.servers.values()
            if not server.draining and server.spec.name not in avoided
        )

    def offers(self, now: float, least: int = 0, avoided: Collection[str] = ()) -> list[Offer]:
        """Return the offer of every server with a device that has `least` bytes free."""
        return [server.offer(now) for server in self.open(avoided) if max(server.free) >= least]
