"""Gateways as the controller knows them: their orders, the groups that they may send to, and their open requests.

Invariant: a group is released only when no living gateway can send to it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from coldstart.fleet.live.messages import GroupRoute, News, NumberedOrder, RequestOrder
from coldstart.host.launches import Launch

ALIVE_S = 15.0
"""Time in seconds after its last call at which a gateway counts as lost."""
BACK_S = 2.0
"""Time in seconds after a controller restart in which gateways may still attach."""


@dataclass(eq=False, slots=True)
class GatewayRecord:
    """One gateway. `knows` are the groups that it has a route to and has not released; `open` are its requests."""

    name: str
    seen: float
    knows: set[str] = field(default_factory=set)
    open: set[str] = field(default_factory=set)
    version: int = -1
    orders: deque[NumberedOrder] = field(default_factory=deque)
    number: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, order: RequestOrder) -> None:
        """Queue an order for the gateway's next pull."""
        self.number += 1
        self.orders.append(NumberedOrder(self.number, order))
        self.news.set()


class Gateways:
    """All gateways by name, and the routes that they receive."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.known: dict[str, GatewayRecord] = {}
        self.routes: dict[str, GroupRoute] = {}
        self.launches: tuple[Launch, ...] = ()
        self.hung: dict[str, int] = {}
        self.version = 0
        self._let_go = asyncio.Event()
        self._all_back = 0.0

    def expect(self) -> None:
        """Start the time in which gateways may attach after a restart; `let_go` waits for its end."""
        self._all_back = self.clock() + BACK_S

    def attach(self, name: str, groups: Collection[str]) -> GatewayRecord:
        """Attach a gateway that is new or has found this controller again; `groups` are those that it can send to."""
        before = self.known.pop(name, None)
        gateway = self.known[name] = GatewayRecord(name, self.clock(), set(groups))
        if before is not None:
            # Orders since the last pull have not been received yet.
            gateway.orders, gateway.number = before.orders, before.number
            before.news.set()
        return gateway

    def find_gateway(self, request: str) -> GatewayRecord | None:
        """Return the gateway of a request: the request's name begins with the gateway's name."""
        return self.known.get(request.partition("/")[0])

    def publish(
        self, routes: dict[str, GroupRoute], launches: tuple[Launch, ...], hung: Mapping[str, int]
    ) -> None:
        """Replace the routes, the launches and the numbers of hung servers that every gateway receives."""
        if routes == self.routes and launches == self.launches and hung == self.hung:
            return
        self.routes, self.launches, self.hung = routes, launches, dict(hung)
        self.version += 1
        for gateway in self.known.values():
            gateway.news.set()

    def touch(self, gateway: GatewayRecord) -> None:
        """Record that the gateway is alive."""
        gateway.seen = self.clock()

    async def news(self, gateway: GatewayRecord, after: int, wait_s: float) -> News:
        """Return the orders after number `after` and changed routes; wait up to `wait_s` seconds if there are none."""
        self.touch(gateway)
        while gateway.orders and gateway.orders[0].number <= after:
            gateway.orders.popleft()
        if not gateway.orders and gateway.version == self.version:
            gateway.news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(gateway.news.wait(), wait_s)
        orders = tuple(gateway.orders)
        if gateway.version == self.version:
            return News(orders)
        gateway.version = self.version
        gateway.knows |= set(self.routes)
        return News(orders, tuple(self.routes.values()), self.launches, self.hung)

    def released(self, gateway: GatewayRecord, group: str) -> None:
        """Record that the gateway has no request at the group and sends none."""
        gateway.knows.discard(group)
        self._let_go.set()

    async def let_go(self, group: str, patience_s: float) -> None:
        """Wait until no living gateway can send to the group, at most `patience_s` seconds."""
        end = self.clock() + patience_s
        while (now := self.clock()) < end and (
            now < self._all_back or any(group in gateway.knows for gateway in self._alive())
        ):
            self._let_go.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._let_go.wait(), min(0.5, patience_s))

    def _alive(self) -> Iterator[GatewayRecord]:
        now = self.clock()
        return (gateway for gateway in self.known.values() if now - gateway.seen < ALIVE_S)

    def remove_lost(self) -> list[GatewayRecord]:
        """Forget the gateways that are lost, and return them."""
        alive = set(map(id, self._alive()))
        gone = [gateway for gateway in self.known.values() if id(gateway) not in alive]
        for gateway in gone:
            del self.known[gateway.name]
        return gone
