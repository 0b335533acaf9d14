"""Main loop of the prefetcher of one source and plan: it owns every client and lease, and the streams only fetch and report.

One thread makes all decisions, so no state needs a lock. The loop never blocks on a client: it reads messages
as they arrive and sends them when the socket accepts them.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections import deque
from time import monotonic
from typing import Any

import msgspec

from coldstart.contract.environment import (
    PREFETCH_IDLE_S,
    PREFETCH_MEMORY_BYTES,
    PREFETCH_PATIENCE_S,
    PREFETCH_STREAMS,
)
from coldstart.contract.weights import PacedFetch
from coldstart.system import timeline
from coldstart.system.ipc import json_lines
from coldstart.system.ipc.peers import Listener, trusted
from coldstart.system.proc import processes
from coldstart.weights.prefetch.connections import ClientConnection
from coldstart.weights.prefetch.errors import PrefetchRefusedError
from coldstart.weights.prefetch.model import MAX_WRONG, PrefetchedModel, name_weights, open_model
from coldstart.weights.prefetch.paces import FetchPace
from coldstart.weights.prefetch.range_source import (
    SourceUnavailableError,
    SourceUnusableError,
    normalise,
    redact,
)
from coldstart.weights.prefetch.schedule import Lease, UnitEntry, UnitState, pick
from coldstart.weights.prefetch.streams import FetchJob, NoMemoryError, Streams, WrongBytesError

# Each rate limit, and the fetches without one, has its own streams, so that a slow fetch delays no other.
MAX_JOBS = 64
# Each worker copies the weights, and needs at least as much memory as the prefetcher.
SHARE = 0.5


class _Attach(msgspec.Struct):
    source: str
    environment: dict[str, str] = {}
    pace: PacedFetch | None = None
    background: bool = False
    early: bool = False
    events: str | None = None


class Service:
    """Prefetcher service; it ends when stopped, or after `idle_s` seconds without a client.

    `patience_s` is the time in seconds during which an unavailable source is retried.
    """

    def __init__(self, listener: Listener) -> None:
        self.streams, self.stopping = int(PREFETCH_STREAMS.read()), False
        self.idle_s, self.patience_s = PREFETCH_IDLE_S.read(), PREFETCH_PATIENCE_S.read()
        memory = int(PREFETCH_MEMORY_BYTES.read())
        self._budget = memory if memory >= 0 else None
        self.model: PrefetchedModel | None = None
        self._paces = dict[str, FetchPace]()  # by the name of the fetch
        self.clients: dict[ClientConnection, None] = {}
        self._streams = Streams(self.streams, self._done)
        self._ended: deque[FetchJob] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._quiet_since = monotonic()
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)

    @property
    def budget(self) -> int:
        """Return the bytes that may be held: by default SHARE of the memory that is available at the first call."""
        if self._budget is None:
            self._budget = int(SHARE * processes.available_memory())
        return self._budget

    def run(self) -> None:
        """Run the loop until the service is stopped or idle."""
        while not self.stopping:
            for key, _ in self._selector.select(self._patience()):
                key.data()
            while self._ended:
                self._settle(self._ended.popleft())
            self._dispatch()
            self._look_after()

    def stop(self) -> None:
        """End the loop soon; a signal handler may call this."""
        self.stopping = True
        self._notify()

    def adopt(self, connection: socket.socket) -> None:
        """Accept a connection; a connection of another user is closed."""
        if not trusted(connection):
            connection.close()
            return
        client = ClientConnection(connection)
        self.clients[client] = None
        self._selector.register(client.channel, selectors.EVENT_READ, lambda: self._heard(client))

    def _accept(self) -> None:
        connection = self._listener.accept()
        if connection is not None:
            self.adopt(connection)

    def _patience(self) -> float | None:
        now, model = monotonic(), self.model
        moments = [model.retry_at - now] if model is not None and model.retry_at > now else []
        if not self.clients:
            moments.append(self._quiet_since + self.idle_s - now)
        return max(0.0, min(moments)) if moments else None

    # Messages from clients.

    def _heard(self, client: ClientConnection) -> None:
        if client.has_unsent:
            client.flush()
        try:
            messages = client.channel.receive()
            if messages is None:
                client.gone = True
            for message in messages or ():
                self._answer(client, message)
        except (json_lines.MalformedMessageError, msgspec.MsgspecError, PrefetchRefusedError) as error:
            client.say({"refused": str(error)})
            client.gone = True

    def _answer(self, client: ClientConnection, message: dict[str, Any]) -> None:
        operation = message.get("op")
        if operation == "attach":
            self._attach(client, message)
        elif operation == "stats" and client.model is not None:
            client.say({"stats": {**client.model.stats(), "streams": self.streams}})
        elif operation == "pace":
            client.say({"pace": self._paced(msgspec.convert(message, PacedFetch))})
        elif operation == "status":
            client.say({"status": self.status()})
        elif operation == "stop":
            self.stopping = True
            client.say({"stopped": os.getpid()})
        else:
            raise json_lines.MalformedMessageError(f"unknown operation {str(operation)[:40]!r}")

    def _attach(self, client: ClientConnection, message: dict[str, Any]) -> None:
        names, plan = json_lines.body(client.channel.take())
        if client.model is not None:
            raise json_lines.MalformedMessageError("a second attach message")
        asked = msgspec.convert(message, _Attach)
        wanted_names = msgspec.json.decode(names, type=list[str] | None)
        model = client.model = self._find(asked.source, plan, asked.environment)
        if asked.pace is not None:
            client.pace = self._paces.setdefault(asked.pace.name, FetchPace(asked.pace.rate))
        client.early, client.began = asked.early, timeline.now()
        client.events = asked.events if asked.events and os.path.isabs(asked.events) else None  # noqa: PTH117
        model.taken = model.taken or not client.early
        known = [[number, *span] for number, ranges in enumerate(model.board.ready) for span in ranges]
        entries = model.want(model.layout.wanted(wanted_names), self.budget)
        client.lease = Lease(model.board, entries, background=asked.background)
        region = model.region.reader() if model.region is not None else None
        client.say({"attached": model.key, "pid": os.getpid(), "ready": known}, region)

    def _find(self, source: str, plan: bytes, environment: dict[str, str]) -> PrefetchedModel:
        address = normalise(source)
        if self.model is None:
            self.model = open_model(address, plan, environment)
        if self.model.key != name_weights(address, plan):
            raise PrefetchRefusedError("this prefetcher fetches the weights of another source or plan")
        self.model.update_environment(environment)
        return self.model

    def _paced(self, asked: PacedFetch) -> dict[str, Any] | None:
        """Set the rate of a fetch; return its progress and whether it has ended, or None if it has not begun."""
        if (pace := self._paces.get(asked.name)) is None:
            return None
        pace.change(asked.rate)
        waits = any(lease_waits(client) for client in self.clients if client.pace is pace)
        return {**pace.document(), "ended": pace.served and not waits}

    # Reports of streams.

    def _done(self, job: FetchJob) -> None:
        self._ended.append(job)
        self._notify()

    def _notify(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _woken(self) -> None:
        os.eventfd_read(self._wake)

    def _settle(self, job: FetchJob) -> None:
        self._streams.jobs.discard(job)
        model, entry, error = job.model, job.entry, job.error
        model.fetched += job.received
        model.refetched += job.received if error is not None else 0
        if error is None:
            model.record_arrival()
            model.board.publish(entry)
            self._tell([entry])
        elif job.generation != model.generation:
            model.board.requeue(entry)
        elif isinstance(error, SourceUnavailableError) and model.delay_retry(self.patience_s):
            model.note(str(error))
            model.board.requeue(entry)
        elif isinstance(error, WrongBytesError) and entry.wrong + 1 < MAX_WRONG:
            entry.wrong += 1
            model.note(f"{error}; fetched again")
            model.board.requeue(entry)
        else:
            self._record_failure(model, entry, error)

    def _record_failure(self, model: PrefetchedModel, entry: UnitEntry, error: Exception) -> None:
        reason = f"{redact(model.address)}: {error}"
        if isinstance(error, WrongBytesError):
            reason = f"{error}, {MAX_WRONG} times, from {redact(model.address)}"
        if isinstance(error, NoMemoryError):
            reason = str(error)
        model.note(reason)
        entry.state, entry.reason = UnitState.FAILED, reason
        failed = [entry]
        if isinstance(error, SourceUnavailableError):
            failed += model.board.fail_rest(None, reason)
            model.abort()
        elif isinstance(error, NoMemoryError):
            failed += model.board.fail_rest(None, reason)
        elif isinstance(error, SourceUnusableError | OSError):
            failed += model.board.fail_rest(entry.unit.file, reason)
        self._tell(failed)

    def _tell(self, entries: list[UnitEntry]) -> None:
        for client in self.clients:
            if client.model is not None:
                client.tell(entries)

    # Scheduling and cleanup.

    def _dispatch(self) -> None:
        model, jobs = self.model, self._streams.jobs
        if model is None or model.retry_at > monotonic():
            return
        paces = {client.lease: client.pace for client in self.clients if client.lease}

        def available(lease: Lease) -> bool:
            return sum(job.pace is paces[lease] for job in jobs) < self.streams

        while len(jobs) < MAX_JOBS and (chosen := pick(paces, available)) is not None:
            lease, entry = chosen
            model.start(entry)
            self._streams.submit(FetchJob(model, entry, model.generation, paces[lease]))

    def _look_after(self) -> None:
        for client in list(self.clients):
            self._report(client)
            if client.gone:
                self._drop(client)
            else:
                self._mind_sending(client)
        idle_s = 0.0 if self.model is None else self.idle_s
        if not self.clients and monotonic() - self._quiet_since >= idle_s:
            self.stopping = True

    def _report(self, client: ClientConnection) -> None:
        """Write the span of a client whose requests are complete, and end an early lease after another client attached."""
        lease, model = client.lease, client.model
        if lease is None or model is None or lease.has_unfinished():
            return
        if client.pace is not None:
            client.pace.served = True
        if client.events is not None:
            self._draw(client, model, client.events)
            client.events = None
        client.gone = client.gone or (client.early and model.taken)

    def _draw(self, client: ClientConnection, model: PrefetchedModel, path: str) -> None:
        if path in model.reported:  # the early lease has written the span
            return
        model.reported.add(path)
        span = timeline.Span("fetch weights", client.began, timeline.now(), "prefetch", model.brief())
        try:
            timeline.append(path, span)
        except OSError as error:
            model.note(f"timeline events: {error}")

    def _mind_sending(self, client: ClientConnection) -> None:
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.has_unsent else 0)
        key = self._selector.get_key(client.channel)
        if key.events != mask:
            self._selector.modify(client.channel, mask, key.data)

    def _drop(self, client: ClientConnection) -> None:
        self._selector.unregister(client.channel)
        del self.clients[client]
        client.close()
        self._quiet_since = monotonic()

    def status(self) -> dict[str, Any]:
        """Return this prefetcher's entry in `coldstart prefetch status`."""
        return {
            "pid": os.getpid(),
            "streams": self.streams,
            "idle_s": self.idle_s,
            "clients": len(self.clients),
            "leases": sum(client.model is not None for client in self.clients),
            "budget_bytes": self.budget,
            **(self.model.document() if self.model is not None else {}),
        }


def lease_waits(client: ClientConnection) -> bool:
    """Return whether the request of the client is unfinished."""
    return client.lease is not None and client.lease.has_unfinished()
