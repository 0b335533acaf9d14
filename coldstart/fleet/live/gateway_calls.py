"""Calls of gateways to the controller: attach, pull, report; and the core's orders to them.

Invariant: the core receives one arrival or route, and one end, for each request of a gateway that lives.
"""

from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

from coldstart.fleet import events
from coldstart.fleet.events import Event
from coldstart.fleet.live.gateways import GatewayRecord, Gateways
from coldstart.fleet.live.messages import (
    Attach,
    AttachReply,
    GatewayEvent,
    GroupReleased,
    MoveEnded,
    News,
    NotAttached,
    OpenRequest,
    Pull,
    Received,
    Report,
    RequestArrived,
    RequestEnded,
    RequestOrder,
    RequestRouted,
)
from coldstart.host.live.log import Log

PULL_S = 5.0


class GatewayCalls:
    """Calls to one incarnation of the controller; `emit` sends an event to the core."""

    def __init__(self, gateways: Gateways, emit: Callable[[Event], None], log: Log) -> None:
        self._gateways, self._emit, self._log = gateways, emit, log
        self.incarnation = uuid4().hex

    def attach(self, call: Attach) -> AttachReply:
        """Attach a gateway that is new, or that has found this controller again."""
        before = self._gateways.known.get(call.gateway)
        known = before.open if before else set()
        gateway = self._gateways.attach(call.gateway, call.groups)
        gateway.open = {one.request for one in call.requests}
        for request in known - gateway.open:
            self._emit(events.Ended(request))
        for one in call.requests:
            if one.request not in known:
                self._emit(_opened(one))
        return AttachReply(self.incarnation)

    async def pull(self, call: Pull) -> News | NotAttached:
        """Return news for a gateway, and wait up to `PULL_S` seconds for them."""
        gateway = self._attached(call)
        return NotAttached() if gateway is None else await self._gateways.news(gateway, call.after, PULL_S)

    def report(self, call: Report) -> Received | NotAttached:
        """Process the events of a gateway, in order."""
        gateway = self._attached(call)
        if gateway is None:
            return NotAttached()
        self._gateways.touch(gateway)
        for event in call.events:
            self._process(gateway, event)
        return Received()

    def _attached(self, call: Pull | Report) -> GatewayRecord | None:
        return self._gateways.known.get(call.gateway) if call.incarnation == self.incarnation else None

    def _process(self, gateway: GatewayRecord, event: GatewayEvent) -> None:
        match event:
            case RequestArrived(request, model):
                gateway.open.add(request)
                self._emit(events.Arrived(request, model))
            case RequestRouted(request, model, group):
                gateway.open.add(request)
                self._emit(events.Routed(request, model, group))
            case RequestEnded(request):
                gateway.open.discard(request)
                self._emit(events.Ended(request))
            case MoveEnded(request, moved):
                self._emit(events.Moved(request, moved))
            case GroupReleased(group):
                self._gateways.released(gateway, group)

    def order(self, order: RequestOrder) -> bool:
        """Send an order to the gateway of its request; return whether that gateway is attached."""
        gateway = self._gateways.of(order.request)
        if gateway is not None:
            gateway.send(order)
        return gateway is not None

    def forget_lost(self) -> None:
        """Forget gateways that have not pulled for long, with their requests."""
        for gateway in self._gateways.lost():
            self._log.say("gateway lost", gateway=gateway.name)
            for request in gateway.open:
                self._emit(events.Ended(request))


def _opened(one: OpenRequest) -> Event:
    if one.group is None:
        return events.Arrived(one.request, one.model)
    return events.Routed(one.request, one.model, one.group)
