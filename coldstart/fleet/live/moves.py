"""Moves of streams from a pipeline to a single worker by recomputation, a few at a time (ParaServe, section 6.2).

The target first generates one token after all tokens so far, while the pipeline continues. So it has computed nearly
all of the stream when the pipeline is stopped and the target continues. A stream that cannot move, or whose move
fails, continues in the pipeline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from coldstart.fleet.handover import Handover, HandoverPace, Request, StreamSide
from coldstart.fleet.live.replicas import FleetReplica, FleetTicket, MovingStream
from coldstart.fleet.live.targets import Targets
from coldstart.host.live.headers import present_key
from coldstart.host.live.log import Log
from coldstart.host.live.tasks import Tasks

PATIENCE_S = 60.0
JSON = ((b"content-type", b"application/json"),)


class _Turns:
    """Limit of concurrent moves to one worker, set by the pace; `asked` counts waiting and running moves."""

    def __init__(self) -> None:
        self.pace, self.asked, self._moving, self._changed = HandoverPace(), 0, 0, asyncio.Condition()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[HandoverPace]:
        self.asked += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._moving < self.pace.at_once)
                self._moving += 1
            try:
                yield self.pace
            finally:
                self._moving -= 1
                async with self._changed:
                    self._changed.notify_all()
        finally:
            self.asked -= 1


class Moves:
    """Moves of one gateway's streams; `count` succeeded.

    `tickets` are the gateway's open requests by number. `ended` is called with the number of each move's request and
    whether it moved.
    """

    def __init__(
        self,
        tickets: Mapping[str, FleetTicket],
        targets: Targets,
        ended: Callable[[str, bool], None],
        clock: Callable[[], float],
        log: Log,
    ) -> None:
        self.count = 0
        self._tickets, self._targets, self._ended, self._clock = tickets, targets, ended, clock
        self._log, self._tasks = log, Tasks(log)
        self._turns: dict[str, _Turns] = {}

    def order(self, ticket: FleetTicket, target: FleetReplica | None) -> None:
        """Move the request when a slot is free."""
        self._tasks.spawn(self._ordered(ticket, target))

    async def _ordered(self, ticket: FleetTicket, target: FleetReplica | None) -> None:
        done, number = False, ticket.number
        if target is not None:
            turns = self._turns.setdefault(target.group, _Turns())
            async with turns.turn() as pace:
                done = self._is_open(ticket) and await self._moved(ticket, target, pace)
            if not turns.asked:
                self._turns.pop(target.group, None)
        if self._is_open(ticket):
            self._ended(number, done)

    def _is_open(self, ticket: FleetTicket) -> bool:
        """Return whether the request is still open under its number."""
        return self._tickets.get(ticket.number) is ticket

    async def _moved(self, ticket: FleetTicket, target: FleetReplica, pace: HandoverPace) -> bool:
        source, stream = ticket.target, ticket.stream
        if source is None or stream is None or ticket.answer is None:
            return self._stays(ticket, "the stream is not resumable")
        handover, clock = Handover(Request()), self._clock
        handover.prepare(clock(), PATIENCE_S)
        target.busy += 1
        done = False
        try:
            if stream.prompt is not None and not await self._warm(target, stream.warming()):
                return self._stays(ticket, "the worker did not compute the tokens so far")
            if not self._is_open(ticket) or stream.finished or not stream.resumable:
                return False
            handover.sent = len(stream.tokens)
            handover.ready()
            settled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            move = ticket.move = MovingStream(target, handover, settled)
            stopped = clock()
            ticket.answer.interrupt()
            await asyncio.wait([settled], timeout=max(0.0, handover.deadline - clock()))
            if not settled.done() and handover.tick(clock()) is not None:
                self._back(ticket, source)
            done = settled.done() and settled.result()
            if done:
                handover.token(StreamSide.WORKER, handover.sent)
                self.count += 1
                gap = round(clock() - stopped, 4)
                pace.moved(gap)
                self._log.say("moved", request=ticket.number, made=handover.sent, gap_s=gap)
            if ticket.move is move:
                ticket.move = None
            return done
        finally:
            # Free the group that the stream has left, or did not reach.
            self._targets.free(source if done else target)

    def _stays(self, ticket: FleetTicket, reason: str) -> bool:
        self._log.say("not moved", request=ticket.number, reason=reason)
        return False

    async def _warm(self, target: FleetReplica, body: bytes) -> bool:
        try:
            async with asyncio.timeout(PATIENCE_S):
                own = [*JSON, *present_key(target.key)]
                asked = await target.upstream.request("POST", "/v1/completions", headers=own, body=body)
                async with asked as answer:
                    await answer.read()
                    return answer.status == 200
        except OSError:  # includes TimeoutError
            return False

    def rolled_back(self, ticket: FleetTicket, reason: str) -> bool:
        """Roll back the stream's move if the target failed before its first token; return whether a move was in progress."""
        move = ticket.move
        if move is None or move.settled.done() or move.handover.failed() is None:
            return False
        self._stays(ticket, reason)
        move.settled.set_result(False)
        assert ticket.target is not None
        ticket.grant(ticket.target)
        return True

    def _back(self, ticket: FleetTicket, source: FleetReplica) -> None:
        self._stays(ticket, "the worker took too long")
        ticket.grant(source)
        if ticket.answer is not None:
            ticket.answer.interrupt()

    def over(self, ticket: FleetTicket) -> None:
        """End the request's move: the request was answered, or is sent elsewhere."""
        if ticket.move is not None and not ticket.move.settled.done():
            ticket.move.settled.set_result(False)

    def close(self) -> None:
        """Cancel all moves."""
        self._tasks.cancel()
