"""Contact of a gateway with the controller: reports events in order, and pulls orders and routes in a loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol
from uuid import uuid4

from coldstart.fleet.live import messages
from coldstart.fleet.live.messages import (
    Attach,
    AttachReply,
    Call,
    GatewayEvent,
    GroupRoute,
    News,
    NotAttached,
    OpenRequest,
    Pull,
    Received,
    Report,
    RequestOrder,
)
from coldstart.host.launches import Launch
from coldstart.host.live.log import Log

AWAY_S = 0.25


class ControllerAwayError(Exception):
    """The controller cannot be reached."""


class ControllerConnection(Protocol):
    """Connection to the controller."""

    async def call(self, call: Call) -> Any:
        """Return the JSON document of the reply. Raises ControllerAwayError."""


class Gatekeeper(Protocol):
    """Receiver of a gateway's orders and routes, which knows the gateway's requests."""

    def known(self) -> tuple[tuple[str, ...], tuple[OpenRequest, ...]]:
        """Return the groups that can be sent to, and all open requests."""

    def update(
        self, routes: tuple[GroupRoute, ...], launches: tuple[Launch, ...], hung: Mapping[str, int]
    ) -> None:
        """Replace the routes, the launches of all deployed models, and the numbers of hung servers by model."""

    def obey(self, order: RequestOrder) -> None:
        """Carry out an order."""

    def alone(self) -> None:
        """Continue without the controller."""


class Contact:
    """Contact of one gateway. `connected`: the controller knows of it, or did when last asked."""

    def __init__(self, connection: ControllerConnection, gate: Gatekeeper, log: Log) -> None:
        self.connection, self.gate, self.log = connection, gate, log
        self.name, self.incarnation, self.connected = uuid4().hex, "", False
        self._after = 0
        self._events: list[GatewayEvent] = []
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Find the controller, and stay in contact."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._pull()), loop.create_task(self._report())]

    async def close(self) -> None:
        """End the contact."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def emit(self, event: GatewayEvent) -> None:
        """Report an event to the controller, after all earlier ones."""
        self._events.append(event)
        self._news.set()

    def away(self) -> None:
        """Continue without the controller until it answers again."""
        if self.connected:
            self.log.say("controller away")
        self.connected = False
        self.gate.alone()

    async def _report(self) -> None:
        """Report events in order; events that cannot be reported are in the next attachment."""
        while True:
            await self._news.wait()
            self._news.clear()
            if not self.connected:
                await asyncio.sleep(AWAY_S)
                self._news.set()
                continue
            batch, self._events = tuple(self._events), []
            if batch:
                await self._send(batch)

    async def _send(self, batch: tuple[GatewayEvent, ...]) -> None:
        try:
            reply = await self.connection.call(Report(self.name, self.incarnation, batch))
            attached = not isinstance(messages.read(reply, Received | NotAttached), NotAttached)
        except (ControllerAwayError, ValueError):
            attached = False
        if not attached:
            self.away()

    async def _pull(self) -> None:
        while True:
            try:
                await self._pull_once()
            except ControllerAwayError:
                self.away()
                await asyncio.sleep(AWAY_S)
            except Exception as error:  # noqa: BLE001 - a bad reply must not end a running gateway
                self.log.say("internal error", reason=f"{type(error).__name__}: {error}")
                self.away()
                await asyncio.sleep(AWAY_S)

    async def _pull_once(self) -> None:
        if not self.connected:
            await self._attach()
        reply = await self.connection.call(Pull(self.name, self.incarnation, self._after))
        news: News | NotAttached = messages.read(reply, News | NotAttached)
        if isinstance(news, NotAttached):
            self.away()
        else:
            self._take(news)

    async def _attach(self) -> None:
        """Attach with all open requests: they replace the events that were not reported."""
        self._events = []
        groups, requests = self.gate.known()
        reply = await self.connection.call(Attach(self.name, groups, requests))
        incarnation = str(messages.read(reply, AttachReply).incarnation)
        if incarnation != self.incarnation:
            self.incarnation, self._after = incarnation, 0
        self.connected = True
        self.log.say("controller found", incarnation=self.incarnation, requests=len(requests))

    def _take(self, news: News) -> None:
        if news.routes is not None:
            self.gate.update(news.routes, news.launches, news.hung)
        for one in news.orders:
            self._after = max(self._after, one.number)
            self.gate.obey(one.order)
