"""Main loop of the prefetcher of one source and plan: it owns every client and lease, and the streams only fetch and report.

One thread makes all decisions, so no state needs a lock. The loop never blocks on a client: it reads messages
as they arrive and sends them when the socket accepts them.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
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
from coldstart.weights.prefetch import PrefetchRefusedError
from coldstart.weights.prefetch.model import MAX_WRONG, PrefetchedModel, name_weights
from coldstart.weights.prefetch.paces import FetchPace
from coldstart.weights.prefetch.schedule import CheckState, Lease, join
from coldstart.weights.prefetch.sources import (
    SourceUnavailableError,
    SourceUnusableError,
    normalise,
    redact,
)
from coldstart.weights.prefetch.streams import FetchJob, NoMemoryError, WrongBytesError, fetch

# Each rate limit, and the fetches without one, has its own streams, so that a slow fetch delays no other.
MAX_JOBS = 64
# Each worker copies the weights, and needs at least as much memory as the prefetcher.
SHARE = 0.5
# Drop a client that does not read its messages before they fill the daemon's memory.
_MAX_UNSENT = 16 << 20


class _Attach(msgspec.Struct):
    source: str
    environment: dict[str, str] = {}
    pace: PacedFetch | None = None
    early: bool = False
    events: str | None = None


class ClientConnection:
    """Connection of one client, with its lease and rate limit; it never blocks, and `gone` is True when it must be dropped."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.channel = json_lines.Channel(connection)
        self.lease: Lease | None = None
        self.pace: FetchPace | None = None
        self.early = self.gone = False
        self.events: str | None = None
        self.began = timeline.now()
        self.unsent = bytearray()
        self._descriptor: int | None = None

    def say(self, message: dict[str, Any], descriptor: int | None = None) -> None:
        """Send a message and a descriptor, which is closed after it is sent."""
        self._descriptor = self._descriptor if descriptor is None else descriptor
        self.unsent += json_lines.encode(message)
        self.flush()
        self.gone = self.gone or len(self.unsent) > _MAX_UNSENT

    def flush(self) -> None:
        """Send as many bytes as the socket accepts now."""
        try:
            while self.unsent:
                beside = () if self._descriptor is None else (self._descriptor,)
                del self.unsent[: json_lines.send_some(self.channel.socket, self.unsent, beside)]
                self._close_descriptor()
        except BlockingIOError:
            pass
        except OSError:
            self.gone = True

    def close(self) -> None:
        """Close the connection."""
        self._close_descriptor()
        self.channel.close()

    def _close_descriptor(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Service:
    """Prefetcher service; it ends when stopped, or after `idle_s` seconds without a client.

    `patience_s` is the time in seconds during which an unavailable source is retried.
    """

    def __init__(self, listener: Listener) -> None:
        self.streams, self.stopping = int(PREFETCH_STREAMS.read()), False
        self.idle_s, self.patience_s = PREFETCH_IDLE_S.read(), PREFETCH_PATIENCE_S.read()
        memory = int(PREFETCH_MEMORY_BYTES.read())
        self.budget = memory if memory >= 0 else int(SHARE * processes.available_memory())
        self.model: PrefetchedModel | None = None
        self.clients: dict[ClientConnection, None] = {}
        self._paces = dict[str, FetchPace]()  # by the name of the fetch
        self._taken = False  # whether a client has attached that is not early
        self._drawn = set[str]()  # timeline files that have a span of this fetch
        self._pool, self._jobs, self._ended = ThreadPoolExecutor(MAX_JOBS), set[FetchJob](), deque[FetchJob]()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._quiet_since = monotonic()
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, lambda: os.eventfd_read(self._wake))

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
        os.eventfd_write(self._wake, 1)

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
        elif operation == "stats" and client.lease is not None and self.model is not None:
            client.say({"stats": {**self.model.stats(), "streams": self.streams}})
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
        if client.lease is not None:
            raise json_lines.MalformedMessageError("a second attach message")
        asked = msgspec.convert(message, _Attach)
        model = self._find(asked.source, plan)
        wanted = model.layout.select(msgspec.json.decode(names, type=list[str] | None))
        ready = join(model.board.list_ready())
        model.want(wanted, asked.environment, self.budget)
        client.lease = Lease(wanted, background=asked.pace is not None and asked.pace.background)
        if asked.pace is not None:
            client.pace = self._paces.setdefault(asked.pace.name, FetchPace(asked.pace.rate))
        client.early, self._taken = asked.early, self._taken or not asked.early
        client.events = asked.events if asked.events and os.path.isabs(asked.events) else None  # noqa: PTH117
        region = model.region.reader() if model.region is not None else None
        client.say({"attached": model.key, "pid": os.getpid(), "ready": ready}, region)

    def _find(self, source: str, plan: bytes) -> PrefetchedModel:
        address = normalise(source)
        if self.model is None:
            self.model = PrefetchedModel(address, plan)
        if self.model.key != name_weights(address, plan):
            raise PrefetchRefusedError("this prefetcher fetches the weights of another source or plan")
        return self.model

    def _paced(self, asked: PacedFetch) -> dict[str, Any] | None:
        """Set the rate of a fetch; return its progress and whether it has ended, or None if it has not begun."""
        if (pace := self._paces.get(asked.name)) is None:
            return None
        pace.change(asked.rate)
        waits = any(self._waits(client) for client in self.clients if client.pace is pace)
        return {**pace.document(), "ended": pace.served and not waits}

    def _waits(self, client: ClientConnection) -> bool:
        return (
            self.model is not None
            and client.lease is not None
            and self.model.board.is_unfinished(client.lease)
        )

    # Scheduling, and the results of streams.

    def _dispatch(self) -> None:
        model, jobs = self.model, self._jobs
        if model is None or model.retry_at > monotonic():
            return
        paces = {client.lease: client.pace for client in self.clients if client.lease}

        def available(lease: Lease) -> bool:
            return sum(job.pace is paces[lease] for job in jobs) < self.streams

        while len(jobs) < MAX_JOBS and (chosen := model.board.pick(paces, available)) is not None:
            lease, run = chosen
            model.board.mark(run, CheckState.BUSY)
            model.began = model.began or monotonic()
            job = FetchJob(model, run, model.requests, paces[lease])
            jobs.add(job)
            self._pool.submit(self._fetch, job)

    def _fetch(self, job: FetchJob) -> None:
        fetch(job)
        self._ended.append(job)
        os.eventfd_write(self._wake, 1)

    def _settle(self, job: FetchJob) -> None:
        self._jobs.discard(job)
        model, error = job.model, job.error
        model.fetched += job.received
        model.board.mark(job.run, CheckState.READY if error is None else CheckState.IDLE)
        if error is None:
            model.record_arrival()
            self._tell({"ready": join(job.run)})
            return
        model.refetched += job.received
        if job.request != model.requests:
            return  # a client has attached since, perhaps with other credentials
        if isinstance(error, SourceUnavailableError) and model.delay_retry(self.patience_s):
            model.note(str(error))
        elif isinstance(error, WrongBytesError):
            model.wrong[error.number] += 1
            if model.wrong[error.number] < MAX_WRONG:
                model.note(f"{error}; fetched again")
            else:
                self._fail([error.number], f"{error}, {MAX_WRONG} times, from {redact(model.address)}")
        elif isinstance(error, NoMemoryError):
            self._fail(model.board.list_idle(), str(error))
        else:
            numbers: Iterable[int] = job.run
            if isinstance(error, SourceUnavailableError):
                numbers = model.board.list_idle()
            elif isinstance(error, SourceUnusableError | OSError):
                numbers = model.board.list_idle(model.layout.checks[job.run.start].file.checks)
            self._fail(numbers, f"{redact(model.address)}: {error}")

    def _fail(self, numbers: Iterable[int], reason: str) -> None:
        assert self.model is not None
        self.model.note(reason)
        self.model.board.mark(numbers, CheckState.FAILED)
        self._tell({"failed": join(numbers), "reason": reason})

    def _tell(self, message: dict[str, Any]) -> None:
        for client in self.clients:
            if client.lease is not None:
                client.say(message)

    # Ends of leases and connections.

    def _look_after(self) -> None:
        for client in list(self.clients):
            if client.lease is not None and not self._waits(client):
                self._complete(client)
            if client.gone:
                self._drop(client)
            else:
                mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
                key = self._selector.get_key(client.channel)
                if key.events != mask:
                    self._selector.modify(client.channel, mask, key.data)
        idle_s = 0.0 if self.model is None else self.idle_s
        if not self.clients and monotonic() - self._quiet_since >= idle_s:
            self.stopping = True

    def _complete(self, client: ClientConnection) -> None:
        """Write the span of a client whose requests are complete, and end an early lease after another client attached."""
        if client.pace is not None:
            client.pace.served = True
        path, client.events = client.events, None
        # An early lease may have written it.
        if path is not None and self.model is not None and path not in self._drawn:
            self._drawn.add(path)
            figures = self.model.document()
            brief = {name: figures[name] for name in ("source", "fetched_bytes", "ready_bytes")}
            try:
                timeline.append(
                    path, timeline.Span("fetch weights", client.began, timeline.now(), "prefetch", brief)
                )
            except OSError as error:
                self.model.note(f"timeline events: {error}")
        client.gone = client.gone or (client.early and self._taken)

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
            "leases": sum(client.lease is not None for client in self.clients),
            "budget_bytes": self.budget,
            **(self.model.document() if self.model is not None else {}),
        }
