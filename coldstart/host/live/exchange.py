"""One request through the gateway: wait until its model is ready, forward the request, and stream the response to the client.

Invariants: each chunk is sent to the client as soon as it arrives, and no chunk of one exchange reaches another. When the
client disconnects, the connection to the server is closed, which makes vLLM abort the request. Each admitted request is
released by the front exactly once, on every path.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import nullcontext, suppress
from typing import Any

from coldstart.host.endpoint import ClientKey
from coldstart.host.live import messages
from coldstart.host.live.access_control import CLIENT
from coldstart.host.live.continuation import Continuation
from coldstart.host.live.front import AdmissionRefusedError, Front, Ticket
from coldstart.host.live.messages import (
    BodyMemory,
    ClientGoneError,
    Headers,
    Receive,
    Scope,
    Send,
    run_while_connected,
)
from coldstart.host.live.upstream import (
    AbortedError,
    DisconnectedError,
    Replica,
    StreamInterruptedError,
    UpstreamAnswer,
)


class Exchange:
    """One proxied request and its response."""

    def __init__(
        self,
        front: Front[Any],
        scope: Scope,
        receive: Receive,
        send: Send,
        memory: BodyMemory,
        heartbeat_s: float,
    ) -> None:
        self.front, self.scope, self.receive, self.send = front, scope, receive, send
        self.memory, self.heartbeat_s = memory, heartbeat_s
        self.client: ClientKey | None = scope.get(CLIENT)
        self.id = messages.choose_request_id(scope)
        self.began = time.perf_counter()
        self.status = 0
        self.asked: str | None = None
        self.streams = False
        self.ticket: Ticket | None = None
        self.body, self._held_bytes = b"", 0
        self.first_s: float | None = None
        self.stream: Continuation | None = None

    async def run(self) -> None:
        """Handle the request and send the response to the client."""
        try:
            self.body = await self.memory.read(self.receive)
            self._held_bytes = len(self.body)
            self.asked, self.streams = messages.parse_routing(self.body)
            await run_while_connected(self.receive, self._answer)
        except ClientGoneError:
            pass
        except AdmissionRefusedError as refused:
            await self._refuse(refused)
        finally:
            self._release()

    def _release(self) -> None:
        """Release the memory of the request body. Later calls do nothing."""
        self.memory.release(self._held_bytes)
        self._held_bytes = 0

    async def _answer(self) -> None:
        client, metrics = self.client, self.front.metrics
        if client is not None and not client.may_use(self.asked, self.front.catalogue):
            metrics.count_client(client.name, "other_model")
            reason = f"the client {client.name} may not use the model `{self.asked}`"
            raise AdmissionRefusedError(403, reason)
        ticket = self.ticket = self.front.enter(self.asked)
        if client is not None:
            metrics.count_client(client.name, "admitted")
        try:
            await self._serve(ticket)
        except AdmissionRefusedError as refused:
            await self._refuse(refused)
        except RecursionError as error:  # a body that can be decoded but not encoded
            await self._refuse(AdmissionRefusedError(400, f"the request body is invalid: {error}"))
        except asyncio.CancelledError:
            self.status = self.status or 499
            raise
        finally:
            self.front.leave(self.ticket)
            queued_s = self.ticket.queued_s
            metrics.count_response(ticket.route.model, self.status, queued_s, self.first_s)

    async def _serve(self, ticket: Ticket) -> None:
        """Forward the request to the granted server, or to another replica if that server fails."""
        self._prepare(ticket)
        while True:
            ticket.stream, ticket.request_id = self.stream, self.id.decode()
            replica = await self._granted(ticket)
            try:
                await self._pass(replica, ticket)
                return
            except (StreamInterruptedError, OSError) as error:  # includes TimeoutError
                if self.stream is not None and self.stream.finished:
                    await self._more(self.stream.ending(), last=True)
                    return
                if isinstance(error, StreamInterruptedError):
                    ticket.interrupted()
                    continue
                # Another server may respond if the response has not begun or its stream is resumable.
                open_ = self.first_s is None or (self.stream is not None and self.stream.resumable)
                again = await self.front.readmit(ticket, replica, error) if open_ else None
                if again is None:
                    await self._break(replica, error)
                    return
                self.ticket = ticket = again

    def _prepare(self, ticket: Ticket) -> None:
        """Replace the model name by the name that the server expects, and create the state with which a stream can continue."""
        if ticket.route.served != self.asked:
            self.body = messages.replace_model(self.body, ticket.route.served)
        if self.front.resumes and self.streams:
            arguments = self.front.catalogue.launches[ticket.route.model].args
            document = messages.decode(json.loads, self.body)
            self.stream = Continuation.create(self._path(), document, arguments)

    def _path(self) -> str:
        return str(self.scope["raw_path"].partition(b"?")[0].decode("ascii"))

    async def _granted(self, ticket: Ticket) -> Replica:
        """Wait until a server is granted; meanwhile send SSE comments to keep a stream alive.

        Raises AdmissionRefusedError.
        """
        # All requests wait in the same way, so they continue in the order in which they were granted.
        while not ticket.granted.done():
            limit_s = self.heartbeat_s if self.streams else None
            if not (await asyncio.wait([ticket.granted], timeout=limit_s))[0]:
                if not self.status:
                    own = [*messages.STREAM_HEADERS, (b"x-request-id", self.id)]
                    await self._start(200, own)
                progress = self.front.progress(ticket.route.model)
                await self._more(messages.comment(progress.encode()))
        return await ticket.granted

    async def _pass(self, replica: Replica, ticket: Ticket) -> None:
        query = self.scope["query_string"].decode("ascii")
        path, body = (self._path(), self.body) if self.stream is None else self.stream.request(self._path())
        later = self.first_s is not None
        async with replica.order if not ticket.hit or replica.order.locked() else nullcontext():
            ticket.answer = await replica.upstream.request(
                self.scope["method"],
                path + (f"?{query}" if query else ""),
                headers=messages.forward_request(self.scope, self.id, replica.key),
                body=body,
            )
        async with ticket.answer as answer:
            if answer.status != 200 and (later or self.status):
                content = await answer.read()
                if not later:
                    # The headers have already announced a stream, so the error is sent as its only event.
                    await self._more(messages.event(content), last=True)
                    return
                detail = content[:200].decode(errors="replace")
                raise DisconnectedError(
                    f"the server that should continue a broken stream returned HTTP {answer.status}: {detail}"
                )
            piece = await answer.piece()
            # Only a response that has arrived completely is checked; a longer one would have to be buffered.
            if not self.streams and answer.whole and _is_aborted(piece):
                raise AbortedError("the server aborted the request when it ended")
            ticket.went_on()
            if not later:
                await self._begin_answer(answer, replica, ticket)
            await self._forward(answer, piece, replica.name)

    async def _begin_answer(self, answer: UpstreamAnswer, replica: Replica, ticket: Ticket) -> None:
        """Send the headers of the first response; if a stream has begun already, send the timing as a comment."""
        self.first_s, self.body = time.perf_counter() - self.began, b""
        if self.stream is not None and answer.status != 200:
            self.stream = ticket.stream = None
        if self.stream is None:
            self._release()
        timing = messages.format_timing(replica, ticket, self.first_s)
        if self.status:
            await self._more(messages.comment("coldstart " + timing))
            return
        passed = messages.forward_response(answer.headers, streams=self.streams)
        own = [(b"x-coldstart-mode", replica.mode.encode()), (b"server-timing", timing.encode())]
        await self._start(answer.status, [*passed, (b"x-request-id", self.id), *own])

    async def _forward(self, answer: UpstreamAnswer, piece: bytes, model: str) -> None:
        """Forward the chunks of a response. Those of a resumable stream are recorded and forwarded as complete events.

        Raises:
            DisconnectedError: The stream ended too early.
        """
        facts, send, stream = self.front.facts.get_model(model), self.send, self.stream
        while piece:
            passed = piece if stream is None else stream.take(piece)
            if passed:
                await send({"type": "http.response.body", "body": passed, "more_body": True})
                facts.chunks_streamed += 1
            if stream is not None and stream.broken:
                raise DisconnectedError(stream.broken)
            piece = await answer.piece()
        if stream is not None and not stream.over:
            raise DisconnectedError("the stream ended before its last event")
        await self._more(b"", last=True)

    async def _break(self, replica: Replica, error: Exception) -> None:
        """Report the failure of a server or its connection to the client, in a form that fits the response so far."""
        reason, detail = f"the server of {replica.name} {replica.fault or 'disconnected'}", str(error)
        self.front.log.write(
            "broken", model=replica.name, request=self.id.decode(), reason=detail or type(error).__name__
        )
        if self.status and not self.streams:
            # A partial response must not look complete, so the connection is closed without the last chunk.
            raise RuntimeError(reason) from error
        await self._fail(502, reason)

    async def _refuse(self, refused: AdmissionRefusedError) -> None:
        self.front.facts.refused[refused.status] += 1
        if refused.detail:
            model = self.ticket.route.model if self.ticket else None
            self.front.log.write(
                "refused", model=model, request=self.id.decode(), status=refused.status, reason=refused.detail
            )
        await self._fail(refused.status, refused.reason, refused.retry_after_s, refused.hint)

    async def _fail(
        self, status: int, reason: str, retry_after_s: float | None = None, hint: str = ""
    ) -> None:
        """Send an error response, or an error event if a stream has begun.

        The error contains the request ID, which also appears in the log.
        """
        number = self.id.decode()
        if self.status or status >= 500:
            reason = f"{reason} (request {number})"
        if self.status:
            await self._more(messages.event(messages.error(status, reason, hint)), last=True)
            return
        self.status = status
        response = messages.refuse(status, reason, retry_after_s, {"x-request-id": number}, hint)
        await response(self.scope, self.receive, self.send)

    async def _start(self, status: int, named: Headers) -> None:
        self.status = status
        await self.send({"type": "http.response.start", "status": status, "headers": named})

    async def _more(self, piece: bytes, *, last: bool = False) -> None:
        await self.send({"type": "http.response.body", "body": piece, "more_body": not last})


def _is_aborted(answer: bytes) -> bool:
    """Return whether a complete response reports that vLLM aborted the request, as vLLM does when it shuts down."""
    if b'"abort"' not in answer:
        return False
    with suppress(ValueError, AttributeError, TypeError):
        return any(choice.get("finish_reason") == "abort" for choice in json.loads(answer).get("choices"))
    return False
