"""Handle one request: wait until its model is ready, forward the request, and stream the response to the client.

Invariants: each chunk is sent to the client as soon as it arrives, and only to the client that sent the request. When the
client disconnects, the connection to the server is closed, which makes vLLM abort the request. The router releases each
admitted request exactly once, on every path.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import nullcontext, suppress

from coldstart.host.endpoint import ClientKey
from coldstart.host.live import messages
from coldstart.host.live.access_control import CLIENT
from coldstart.host.live.continuation import Continuation
from coldstart.host.live.request_router import AdmissionRefusedError, RequestRouter, Ticket
from coldstart.host.live.upstream import (
    AbortedError,
    DisconnectedError,
    Replica,
    StreamInterruptedError,
    UpstreamResponse,
)


class Exchange:
    """One proxied request and its response."""

    def __init__(
        self,
        router: RequestRouter,
        scope: messages.Scope,
        receive: messages.Receive,
        send: messages.Send,
        memory: messages.BodyMemory,
        heartbeat_s: float,
    ) -> None:
        self.router, self.scope, self.receive, self.send = router, scope, receive, send
        self.memory, self.heartbeat_s = memory, heartbeat_s
        self.client: ClientKey | None = scope.get(CLIENT)
        self.id = messages.choose_request_id(scope)
        self.began = time.perf_counter()
        self.status = 0
        self.requested_model: str | None = None
        self.is_streaming = False
        self.ticket: Ticket | None = None
        self.body, self._held_bytes = b"", 0
        self.first_chunk_s: float | None = None
        self.stream: Continuation | None = None

    async def run(self) -> None:
        """Handle the request and send the response to the client."""
        try:
            self.body = await self.memory.read(self.receive)
            self._held_bytes = len(self.body)
            self.requested_model, self.is_streaming = messages.parse_routing(self.body)
            await messages.run_while_connected(self.receive, self._handle)
        except messages.ClientGoneError:
            pass
        except AdmissionRefusedError as refused:
            await self._refuse(refused)
        finally:
            self._release()

    def _release(self) -> None:
        self.memory.release(self._held_bytes)
        self._held_bytes = 0

    async def _handle(self) -> None:
        client, metrics = self.client, self.router.metrics
        if client is not None and not client.may_use(self.requested_model, self.router.catalogue):
            metrics.count_client_request(client.name, "other_model")
            reason = f"client {client.name} is not allowed to use the model `{self.requested_model}`"
            raise AdmissionRefusedError(403, reason)
        ticket = self.ticket = self.router.admit_request(self.requested_model)
        if client is not None:
            metrics.count_client_request(client.name, "admitted")
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
            self.router.end_request(self.ticket)
            queued_s = self.ticket.queued_s
            metrics.count_response(ticket.destination.model, self.status, queued_s, self.first_chunk_s)

    async def _serve(self, ticket: Ticket) -> None:
        self._prepare(ticket)
        while True:
            ticket.continuation, ticket.request_id = self.stream, self.id.decode()
            replica = await self._await_grant(ticket)
            try:
                await self._forward_request(replica, ticket)
                return
            except (StreamInterruptedError, OSError) as error:  # includes TimeoutError
                if self.stream is not None and self.stream.finished:
                    await self._send_chunk(self.stream.build_final_events(), last=True)
                    return
                if isinstance(error, StreamInterruptedError):
                    ticket.requeue()
                    continue
                # Another server may respond if the response has not begun or its stream is resumable.
                open_ = self.first_chunk_s is None or (self.stream is not None and self.stream.is_resumable)
                again = await self.router.readmit_request(ticket, replica, error) if open_ else None
                if again is None:
                    await self._report_failure(replica, error)
                    return
                self.ticket = ticket = again

    def _prepare(self, ticket: Ticket) -> None:
        """Replace the model name with the one that the server expects, and create the state for continuing a stream."""
        if ticket.destination.served_name != self.requested_model:
            self.body = messages.replace_model(self.body, ticket.destination.served_name)
        if self.router.resumes_streams and self.is_streaming:
            arguments = self.router.catalogue.launches[ticket.destination.model].args
            document = messages.parse_body(json.loads, self.body)
            self.stream = Continuation.create(self._path(), document, arguments)

    def _path(self) -> str:
        return str(self.scope["raw_path"].partition(b"?")[0].decode("ascii"))

    async def _await_grant(self, ticket: Ticket) -> Replica:
        """Wait for a server and return it. If the response is a stream, send SSE comments meanwhile, which keep it open.

        Raises AdmissionRefusedError if the request is rejected.
        """
        # All requests wait in the same way, so they continue in the order in which they were granted.
        while not ticket.granted.done():
            limit_s = self.heartbeat_s if self.is_streaming else None
            if not (await asyncio.wait([ticket.granted], timeout=limit_s))[0]:
                if not self.status:
                    own = [*messages.STREAM_HEADERS, (b"x-request-id", self.id)]
                    await self._start(200, own)
                progress = self.router.get_start_progress(ticket.destination.model)
                await self._send_chunk(messages.format_comment(progress.encode()))
        return await ticket.granted

    async def _forward_request(self, replica: Replica, ticket: Ticket) -> None:
        query = self.scope["query_string"].decode("ascii")
        path, body = (
            (self._path(), self.body) if self.stream is None else self.stream.build_next_request(self._path())
        )
        later = self.first_chunk_s is not None
        async with replica.send_lock if not ticket.is_hit or replica.send_lock.locked() else nullcontext():
            ticket.response = await replica.upstream.request(
                self.scope["method"],
                path + (f"?{query}" if query else ""),
                headers=messages.filter_request_headers(self.scope, self.id, replica.key),
                body=body,
            )
        async with ticket.response as answer:
            if answer.status != 200 and (later or self.status):
                content = await answer.read()
                if not later:
                    # The headers have already announced a stream, so the error is sent as its only event.
                    await self._send_chunk(messages.format_error_event(content, path), last=True)
                    return
                detail = content[:200].decode(errors="replace")
                raise DisconnectedError(
                    f"the server that should continue an interrupted stream returned HTTP {answer.status}: {detail}"
                )
            chunk = await answer.read_chunk()
            # Only a response that has arrived completely is checked; a longer one would have to be buffered.
            if not self.is_streaming and answer.is_complete and _is_aborted(chunk):
                raise AbortedError("the server shut down and aborted the request")
            ticket.record_first_chunk()
            if not later:
                await self._begin_answer(answer, replica, ticket)
            await self._stream_response(answer, chunk, replica.name)

    async def _begin_answer(self, answer: UpstreamResponse, replica: Replica, ticket: Ticket) -> None:
        """Send the headers of the first response. If a stream has already begun, send the timing as a comment instead."""
        self.first_chunk_s, self.body = time.perf_counter() - self.began, b""
        if self.stream is not None and answer.status != 200:
            self.stream = ticket.continuation = None
        if self.stream is None:
            self._release()
        timing = messages.format_timing(replica, ticket, self.first_chunk_s)
        if self.status:
            await self._send_chunk(messages.format_comment("coldstart " + timing))
            return
        passed = messages.filter_response_headers(answer.headers, streams=self.is_streaming)
        own = [(b"x-coldstart-mode", replica.mode.encode()), (b"server-timing", timing.encode())]
        await self._start(answer.status, [*passed, (b"x-request-id", self.id), *own])

    async def _stream_response(self, answer: UpstreamResponse, chunk: bytes, model: str) -> None:
        """Forward the chunks of a response. The chunks of a resumable stream are recorded and forwarded as complete events.

        Raises:
            DisconnectedError: The stream ended too early.
        """
        facts, send, stream = self.router.facts.get_model(model), self.send, self.stream
        while chunk:
            passed = chunk if stream is None else stream.filter_chunk(chunk)
            if passed:
                await send({"type": "http.response.body", "body": passed, "more_body": True})
                facts.chunks_streamed += 1
            if stream is not None and stream.error:
                raise DisconnectedError(stream.error)
            chunk = await answer.read_chunk()
        if stream is not None and not stream.is_over:
            raise DisconnectedError("the server closed the stream before its last event")
        await self._send_chunk(b"", last=True)

    async def _report_failure(self, replica: Replica, error: Exception) -> None:
        reason, detail = f"the server of {replica.name} {replica.fault or 'disconnected'}", str(error)
        self.router.log.write(
            "broken", model=replica.name, request=self.id.decode(), reason=detail or type(error).__name__
        )
        if self.status and not self.is_streaming:
            # A partial response must not look complete, so the connection is closed without the last chunk.
            raise RuntimeError(reason) from error
        await self._send_error(502, reason)

    async def _refuse(self, refused: AdmissionRefusedError) -> None:
        self.router.facts.refused[refused.status] += 1
        if refused.log_detail:
            model = self.ticket.destination.model if self.ticket else None
            self.router.log.write(
                "refused",
                model=model,
                request=self.id.decode(),
                status=refused.status,
                reason=refused.log_detail,
            )
        await self._send_error(refused.status, refused.reason, refused.retry_after_s, refused.hint)

    async def _send_error(
        self, status: int, reason: str, retry_after_s: float | None = None, hint: str = ""
    ) -> None:
        """Send an error response or, if a stream has begun, an error event. It contains the request ID that the log shows."""
        number = self.id.decode()
        if self.status or status >= 500:
            reason = f"{reason} (request {number})"
        if self.status:
            error = messages.build_error(status, reason, hint)
            await self._send_chunk(messages.format_error_event(error, self._path()), last=True)
            return
        self.status = status
        response = messages.build_error_response(
            status, reason, retry_after_s, {"x-request-id": number}, hint
        )
        await response(self.scope, self.receive, self.send)

    async def _start(self, status: int, named: messages.Headers) -> None:
        self.status = status
        await self.send({"type": "http.response.start", "status": status, "headers": named})

    async def _send_chunk(self, chunk: bytes, *, last: bool = False) -> None:
        await self.send({"type": "http.response.body", "body": chunk, "more_body": not last})


def _is_aborted(answer: bytes) -> bool:
    """Return whether a complete response reports that vLLM aborted the request, as vLLM does when it shuts down."""
    if b'"abort"' not in answer:
        return False
    with suppress(ValueError, AttributeError, TypeError):
        return any(choice.get("finish_reason") == "abort" for choice in json.loads(answer).get("choices"))
    return False
