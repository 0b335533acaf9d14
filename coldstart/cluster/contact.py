"""A gateway's touch with the controller: what happened is told in order, what is to be known is asked for, again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol
from uuid import uuid4

from coldstart.gateway.log import Log

AWAY_S = 0.25


class ControllerAway(Exception):
    """Nobody answers for the controller."""


class ControllerConnection(Protocol):
    """The way to the controller."""

    async def call(self, method: str, *args: Any) -> Any:
        """Raises ControllerAway."""


class Gatekeeper(Protocol):
    """Whoever is told, and tells all there is."""

    def known(self) -> tuple[list[str], list[list[str]]]:
        """Groups that can be sent to, and requests: [number, model, group or ""]."""

    def routed(self, routes: list[Mapping[str, Any]], models: list[Any]) -> None:
        """Who serves, and what is deployed."""

    def ordered(self, order: list[Any]) -> None:
        """What is to become of a request."""

    def alone(self) -> None:
        """The controller is away."""


class Contact:
    """That of one gateway. `connected`: the controller knows of it, or did when last asked."""

    def __init__(self, link: ControllerConnection, gate: Gatekeeper, log: Log) -> None:
        self.link, self.gate, self.log = link, gate, log
        self.name, self.incarnation, self.connected = uuid4().hex, "", False
        self._after = 0
        self._happened: list[list[Any]] = []
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Find the controller, and stay in touch."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._pull()), loop.create_task(self._report())]

    async def close(self) -> None:
        """Leave it alone."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def happened(self, *what: Any) -> None:
        """The controller is to hear of it, after what happened before."""
        self._happened.append(list(what))
        self._news.set()

    def away(self) -> None:
        """Nobody answers."""
        if self.connected:
            self.log.say("controller away")
        self.connected = False
        self.gate.alone()

    async def _report(self) -> None:
        """Send what happened, in order; what could not be sent is told by attaching."""
        while True:
            await self._news.wait()
            self._news.clear()
            if not self.connected:
                await asyncio.sleep(AWAY_S)
                self._news.set()
                continue
            batch, self._happened = self._happened, []
            if not batch:
                continue
            try:
                answer = await self.link.call("report", self.name, self.incarnation, batch)
            except ControllerAway:
                self.away()
                continue
            if "attach" in answer:
                self.away()

    async def _pull(self) -> None:
        while True:
            try:
                if not self.connected:
                    await self._attach()
                answer = await self.link.call("pull", self.name, self.incarnation, self._after)
            except ControllerAway:
                self.away()
                await asyncio.sleep(AWAY_S)
                continue
            if "attach" in answer:
                self.away()
                continue
            try:
                self._take(answer)
            except Exception as error:  # noqa: BLE001 - what was answered is no good; who serves goes on serving
                self.log.say("internal error", reason=f"{type(error).__name__}: {error}")
                self.away()
                await asyncio.sleep(AWAY_S)

    async def _attach(self) -> None:
        """Tell all there is: what happened before is in it."""
        self._happened = []
        groups, requests = self.gate.known()
        answer = await self.link.call("attach", self.name, groups, requests)
        if answer["incarnation"] != self.incarnation:
            self.incarnation, self._after = answer["incarnation"], 0
        self.connected = True
        self.log.say("controller found", incarnation=self.incarnation, requests=len(requests))

    def _take(self, answer: Mapping[str, Any]) -> None:
        if "routes" in answer:
            self.gate.routed(answer["routes"], answer["models"])
        for number, order in answer["orders"]:
            self._after = max(self._after, number)
            self.gate.ordered(order)
