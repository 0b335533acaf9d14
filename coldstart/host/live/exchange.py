"""One request through the gateway: held until its model serves, sent on, its answer passed back piece by piece.

Invariant: a piece goes to the client as soon as it is here, and no piece of one exchange reaches another. When the client goes,
the connection to the server is closed, which makes vLLM abort the request. Whatever happens, the front is left exactly once.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from typing import Any

from coldstart.host.live import answers, headers
from coldstart.host.live.answers import Headers, Receive, Scope, Send
from coldstart.host.live.client import ClientGoneError, read, with_client
from coldstart.host.live.continuation import Continuation
from coldstart.host.live.front import Front
from coldstart.host.live.tickets import AdmissionRefusedError, Ticket
from coldstart.host.live.upstream import DisconnectedError, Replica, StreamInterruptedError, UpstreamAnswer


class Exchange:
    """One request and its answer."""

    def __init__(self, front: Front, scope: Scope, receive: Receive, send: Send, heartbeat_s: float) -> None:
        self.front, self.scope, self.receive, self.send = front, scope, receive, send
        self.heartbeat_s = heartbeat_s
        self.id = headers.choose_request_id(scope)
        self.began = time.perf_counter()
        self.status = 0
        self.streams = False
        self.ticket: Ticket | None = None
        self.body = b""
        self.first_s: float | None = None
        self.stream: Continuation | None = None

    async def run(self) -> None:
        """Answer the request."""
        try:
            self.body = await read(self.receive)
        except ClientGoneError:
            return
        except ValueError as error:
            await self._error(413, str(error))
            return
        with suppress(ClientGoneError):
            await with_client(self.receive, self._answer)

    async def _answer(self) -> None:
        try:
            asked = self._asked()
        except ValueError as error:
            await self._error(400, str(error))
            return
        try:
            self.ticket = self.front.enter(asked)
        except AdmissionRefusedError as refused:
            await self._refused(refused)
            return
        try:
            await self._held(self.ticket)
        except asyncio.CancelledError:
            self.status = self.status or 499
            raise
        finally:
            self.ticket.passed_on()
            self.front.leave(self.ticket)
            self.front.metrics.count_answer(self.ticket, self.status, self.first_s)

    def _asked(self) -> str | None:
        """The model that the body names. Raises ValueError for a body that is none."""
        try:
            self.document: Any = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the body is no JSON: {error}") from error
        if not isinstance(self.document, dict):
            raise ValueError("the body is no JSON object")
        asked = self.document.get("model")
        if asked is not None and not isinstance(asked, str):
            raise ValueError("model is no text")
        self.streams = self.document.get("stream") is True
        return asked

    async def _held(self, ticket: Ticket) -> None:
        if ticket.route.served != self.document.get("model"):
            self.body = json.dumps({**self.document, "model": ticket.route.served}).encode()
        self._look_ahead(ticket)
        del self.document
        while True:
            ticket.stream = self.stream
            try:
                replica = await self._granted(ticket)
            except AdmissionRefusedError as refused:
                await self._refused(refused)
                return
            try:
                await self._pass(replica, ticket)
                return
            except (StreamInterruptedError, OSError) as error:  # TimeoutError is one
                if self.stream is not None and self.stream.finished:
                    await self._more(self.stream.ending(), last=True)
                    return
                if isinstance(error, StreamInterruptedError):
                    ticket.interrupted()
                    continue
                # Nothing was said yet, or what was can go on: somebody else may.
                open_ = self.first_s is None or (self.stream is not None and self.stream.resumable)
                again = await self.front.again(ticket, replica, error) if open_ else None
                if again is None:
                    await self._broken(replica, error)
                    return
                self.ticket = ticket = again

    def _look_ahead(self, ticket: Ticket) -> None:
        """Keep what is needed to go on elsewhere, where that can be."""
        path, words = self._path(), self.front.catalogue.launches[ticket.route.model].args
        if self.front.resumes and self.streams:
            document = {**self.document, "model": ticket.route.served}
            self.stream = Continuation.of(path, document, words)

    def _path(self) -> str:
        return str(self.scope["raw_path"].partition(b"?")[0].decode("ascii"))

    async def _granted(self, ticket: Ticket) -> Replica:
        """Wait for the model; a stream is kept alive meanwhile by comments. Raises AdmissionRefusedError."""
        while self.streams and not ticket.granted.done():
            done, _ = await asyncio.wait([ticket.granted], timeout=self.heartbeat_s)
            if not done:
                await self._begin_events()
                model = ticket.route.model
                await self._more(answers.comment(f"waiting for {model}: {self.front.state(model)}"))
        return await ticket.granted

    async def _begin_events(self) -> None:
        if not self.status:
            await self._start(200, [*headers.build_for_stream(), (b"x-request-id", self.id)])

    async def _pass(self, replica: Replica, ticket: Ticket) -> None:
        query = self.scope["query_string"].decode("ascii")
        path, body = (self._path(), self.body) if self.stream is None else self.stream.request(self._path())
        later = self.first_s is not None
        await ticket.turn()
        ticket.answer = await replica.upstream.request(
            self.scope["method"],
            path + (f"?{query}" if query else ""),
            headers=headers.forward_request(self.scope, self.id),
            body=body,
            sent=ticket.passed_on if ticket.sent else None,
        )
        async with ticket.answer as answer:
            if later and self.stream is not None:
                await self._go_on(self.stream, answer, ticket)
                return
            if self.status and answer.status != 200:
                # The client was promised a stream: the error is its one event.
                await self._more(answers.event(await answer.read()), last=True)
                return
            piece = await answer.piece()
            ticket.went_on()
            self.first_s, self.body = time.perf_counter() - self.began, b""
            if self.stream is not None and answer.status != 200:
                self.stream = ticket.stream = None
            if self.status:
                await self._more(answers.comment("coldstart " + self._timing(replica, ticket)))
            else:
                passed = headers.forward_answer(answer.headers, streams=self.streams)
                own = headers.build_for_answer(self.id, replica.mode, self._timing(replica, ticket))
                await self._start(answer.status, [*passed, *own])
            facts, send, next_piece = self.front.facts.of(replica.name), self.send, answer.piece
            if self.stream is not None:
                await self._kept(self.stream, answer, piece)
                return
            while piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                facts.chunks_streamed += 1
                piece = await next_piece()
            await self._more(b"", last=True)

    async def _go_on(self, stream: Continuation, answer: UpstreamAnswer, ticket: Ticket) -> None:
        """The rest of a stream that another server began."""
        if answer.status != 200:
            detail = (await answer.read())[:200].decode(errors="replace")
            raise DisconnectedError(f"it does not take the rest of a stream: {answer.status} {detail}")
        piece = await answer.piece()
        ticket.went_on()
        await self._kept(stream, answer, piece)

    async def _kept(self, stream: Continuation, answer: UpstreamAnswer, piece: bytes) -> None:
        """Pass on what comes, in whole events, each remembered. Raises Disconnected where it ends too early."""
        facts = self.front.facts.of(self.ticket.route.model) if self.ticket else None
        while piece:
            if passed := stream.take(piece):
                await self.send({"type": "http.response.body", "body": passed, "more_body": True})
                if facts is not None:
                    facts.chunks_streamed += 1
            if stream.broken:
                raise DisconnectedError(stream.broken)
            piece = await answer.piece()
        if not stream.over:
            raise DisconnectedError("the stream ended before its last event")
        await self._more(b"", last=True)

    async def _broken(self, replica: Replica, error: Exception) -> None:
        """The server went, or its connection: said in the form that the answer has begun in."""
        reason = f"the server of {replica.name} broke off"
        self.front.log.say(
            "broken",
            model=replica.name,
            request=self.id.decode(),
            reason=str(error) or type(error).__name__,
        )
        if not self.status:
            await self._error(502, reason)
        elif self.streams:
            await self._more(answers.event(answers.error(502, self._named(reason))), last=True)
        else:
            # Half of an answer must not look like a whole one: without its last piece the connection is broken off.
            raise RuntimeError(reason) from error

    async def _refused(self, refused: AdmissionRefusedError) -> None:
        if refused.detail:
            model = self.ticket.route.model if self.ticket else None
            self.front.log.say(
                "refused", model=model, request=self.id.decode(), status=refused.status, reason=refused.detail
            )
        if self.status:
            content = answers.error(refused.status, self._named(refused.reason))
            await self._more(answers.event(content), last=True)
            return
        await self._error(refused.status, refused.reason, refused.retry_after_s)

    def _named(self, reason: str) -> str:
        """What went wrong here, with what to look for in the log."""
        return f"{reason} (request {self.id.decode()})"

    async def _error(self, status: int, reason: str, retry_after_s: float | None = None) -> None:
        self.status = status
        reason = reason if status < 500 else self._named(reason)
        await answers.send_error(
            self.send, status, reason, headers=[(b"x-request-id", self.id)], retry_after_s=retry_after_s
        )

    async def _start(self, status: int, named: Headers) -> None:
        self.status = status
        await self.send({"type": "http.response.start", "status": status, "headers": named})

    async def _more(self, piece: bytes, *, last: bool = False) -> None:
        await self.send({"type": "http.response.body", "body": piece, "more_body": not last})

    def _timing(self, replica: Replica, ticket: Ticket) -> str:
        return headers.format_timing(replica, ticket, self.first_s)
