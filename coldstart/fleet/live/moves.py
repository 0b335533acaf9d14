"""Migration of streams with their KV cache to a single worker, from a pipeline (ParaServe, section 6.2) or a drained server.

The target loads the KV of the tokens generated so far while the source continues. After the source has stopped the
stream, the target loads the KV of the last tokens along with the rest of the request. If there is no KV, the target
recomputes the tokens. A stream that cannot be migrated, or whose migration fails, continues at the source.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from coldstart.contract import handover
from coldstart.fleet.live.orders import RankUp
from coldstart.host.live.continuation import Continuation
from coldstart.host.live.log import BackgroundTasks, Log
from coldstart.host.live.messages import build_auth_header
from coldstart.host.live.request_router import Ticket
from coldstart.host.live.upstream import Replica, Upstream

# In a data center, a slower connection means that the server is down.
CONNECT_TIMEOUT_S = 2.5
# Maximum number of streams that migrate to a worker at the same time. They pause while they migrate, and more would slow each
# other down. Streams in the queue continue at their source.
MAX_CONCURRENT_MOVES = 2


class FleetReplica(Replica):
    """A group that serves requests. `up` describes the worker that receives its requests."""

    def __init__(self, group: str, model: str, up: RankUp) -> None:
        url = urlsplit(up.url)
        place = str(url.hostname), url.port or 80
        super().__init__(model, Upstream(place, connect_s=CONNECT_TIMEOUT_S), up.key)
        self.group, self.mode, self.start_s = group, up.mode, up.start_s
        self.handover_key, self.move_slots = up.handover_key, asyncio.Semaphore(MAX_CONCURRENT_MOVES)


@dataclass(eq=False)
class MovingStream:
    """A stream that is being migrated to `target`. `has_left` is True once the source has been stopped.

    `settled` completes when the migration ends, with True if the stream has reached the target.
    """

    target: FleetReplica
    settled: asyncio.Future[bool]
    has_left: bool = False


@dataclass(eq=False)
class FleetTicket(Ticket):
    """Ticket of a request to a fleet.

    `target` is the group that processes the request, and `move` is its current migration. `unsent` is the number of the
    `earlier_tries` that failed before the request was sent.
    """

    target: FleetReplica | None = None
    move: MovingStream | None = None
    unsent: int = 0

    def grant(self, replica: FleetReplica) -> None:
        """Grant this group to the request, even if another group was granted before."""
        self.granted = asyncio.get_running_loop().create_future()
        self.granted.set_result(replica)

    def requeue(self) -> None:
        """Continue the request at the target of the migration, or at the current group if the migration was rolled back."""
        if self.move is not None and not self.move.has_left and not self.move.settled.done():
            self.move.has_left = True
            self.grant(self.move.target)

    def record_first_chunk(self) -> None:
        """Mark the migration as successful when its target sends the first chunk."""
        move = self.move
        if move is not None and move.has_left and not move.settled.done():
            self.target = move.target
            move.settled.set_result(True)


MOVE_TIMEOUT_S = 60.0
# The source responds in its next iteration. If a full batch delays it, the target recomputes the tokens.
HOLD_TIMEOUT_S = 5.0
JSON_HEADERS = ((b"content-type", b"application/json"),)


class Moves:
    """Stream migrations of a fleet.

    `moved_count` migrations succeeded, `moved_with_kv` of them with the KV cache, and `failed_count` failed. `tickets` maps
    request numbers to the open requests. `ended` is called after each migration with the request number and whether it
    succeeded.
    """

    def __init__(
        self,
        tickets: Mapping[str, FleetTicket],
        ended: Callable[[str, bool], None],
        clock: Callable[[], float],
        log: Log,
    ) -> None:
        self.moved_count = self.moved_with_kv = self.failed_count = 0
        self._tickets, self._ended, self._clock = tickets, ended, clock
        self._log, self._tasks = log, BackgroundTasks(log)

    def schedule_move(self, ticket: FleetTicket, target: FleetReplica) -> None:
        """Migrate the stream of a request as soon as the target has a free slot."""
        self._tasks.spawn(self._move_in_turn(ticket, target))

    async def _move_in_turn(self, ticket: FleetTicket, target: FleetReplica) -> None:
        async with target.move_slots:
            done = self._is_open(ticket) and await self._move(ticket, target)
        if self._is_open(ticket):
            self._ended(ticket.ticket_id, done)

    def _is_open(self, ticket: FleetTicket) -> bool:
        return self._tickets.get(ticket.ticket_id) is ticket

    async def _move(self, ticket: FleetTicket, target: FleetReplica) -> bool:
        source, stream, deadline = ticket.target, ticket.continuation, self._clock() + MOVE_TIMEOUT_S
        if source is None or stream is None or ticket.response is None:
            self._log.write(
                "not moved", request=ticket.ticket_id, reason="another worker cannot resume the stream"
            )
            return False
        kv = await self._hold_kv(ticket, source, target, stream)
        if (
            stream.prompt is not None
            and await self._complete(target, stream.build_warmup_request(kv), MOVE_TIMEOUT_S) is None
        ):
            return self._record_failed_move(
                ticket, "the new worker did not prefill the tokens generated so far"
            )
        if kv is not None:
            kv = await self._hold_kv(ticket, source, target, stream)
        if not self._is_open(ticket) or stream.finished or not stream.is_resumable:
            return False
        stream.kv = kv
        generated, stopped_s = len(stream.tokens), self._clock()
        settled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        ticket.move = MovingStream(target, settled)
        ticket.response.interrupt()
        await asyncio.wait([settled], timeout=max(0.0, deadline - stopped_s))
        if not settled.done():
            self.roll_back(ticket, "the new worker did not continue the stream in time")
            ticket.response.interrupt()
        ticket.move = None
        if settled.result():
            self.moved_count += 1
            self.moved_with_kv += kv is not None
            gap = round(self._clock() - stopped_s, 4)
            self._log.write(
                "moved", request=ticket.ticket_id, made=generated, gap_s=gap, with_kv=kv is not None
            )
        return settled.result()

    def _record_failed_move(self, ticket: FleetTicket, reason: str) -> bool:
        self.failed_count += 1
        self._log.write("not moved", request=ticket.ticket_id, reason=reason)
        return False

    async def _hold_kv(
        self, ticket: FleetTicket, source: FleetReplica, target: FleetReplica, stream: Continuation
    ) -> dict[str, str] | None:
        """Make the source retain the stream's KV. Return the transfer parameters for the target, or None if this fails."""
        if stream.prompt is None or not (source.handover_key and target.handover_key):
            return None
        body = stream.build_pin_request(ticket.request_id, source.handover_key)
        response = await self._complete(source, body, HOLD_TIMEOUT_S)
        reason = "the server did not retain the KV"
        try:
            given = json.loads(response or b"{}").get(handover.PARAMETER)
            if (pull := handover.verify_and_decode(source.handover_key, given)) is not None:
                return handover.sign(target.handover_key, pull)
        except (ValueError, AttributeError) as error:
            reason = str(error)
        self._log.write("kv not held", request=ticket.ticket_id, reason=reason)
        return None

    @staticmethod
    async def _complete(replica: FleetReplica, body: bytes, limit_s: float) -> bytes | None:
        """Return the response of `replica` to a completion request, or None if it fails or takes over `limit_s` seconds."""
        try:
            async with asyncio.timeout(limit_s):
                own = [*JSON_HEADERS, *build_auth_header(replica.key)]
                asked = await replica.upstream.request("POST", "/v1/completions", headers=own, body=body)
                async with asked as answer:
                    read = await answer.read()
                    return read if answer.status == 200 else None
        except OSError:  # includes TimeoutError
            return None

    def roll_back(self, ticket: FleetTicket, reason: str) -> bool:
        """Roll back a migration whose target failed before its first token. Return whether a migration was in progress."""
        move = ticket.move
        if move is None or move.settled.done():
            return False
        self._record_failed_move(ticket, reason)
        move.settled.set_result(False)
        assert ticket.target is not None
        ticket.grant(ticket.target)
        return True

    def end_move(self, ticket: FleetTicket) -> None:
        """End the migration of a request that has ended or was sent to another group."""
        if ticket.move is not None and not ticket.move.settled.done():
            ticket.move.settled.set_result(False)

    def close(self) -> None:
        """Cancel all migrations."""
        self._tasks.cancel()
