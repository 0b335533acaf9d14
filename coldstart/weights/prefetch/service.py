"""Prefetcher process for one source and weights plan: `python -m coldstart.weights.prefetch.service SOCKET DESCRIPTOR`.

One thread per client handles its requests in order. An open connection is a lease. The process exits on a stop request or
when it has had no clients for the idle timeout.

A file lock selects the process that serves. The kernel releases the lock when the process exits, so a socket without a
held lock is stale and is replaced. A process that does not get the lock exits once the lock holder serves, and its client
connects to the holder. The holder removes the socket, the lock and the log when it exits.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread
from typing import Any

import msgspec

from coldstart.artifacts import files
from coldstart.contract.environment import (
    PREFETCH_IDLE_S,
    PREFETCH_MEMORY_BYTES,
    PREFETCH_PATIENCE_S,
    PREFETCH_STREAMS,
)
from coldstart.contract.weights import LimitedFetch
from coldstart.system import timeline
from coldstart.system.ipc import json_lines, peers
from coldstart.system.ipc.json_lines import Channel
from coldstart.system.ipc.peers import await_readable
from coldstart.system.proc import processes
from coldstart.weights.prefetch import PrefetchRefusedError
from coldstart.weights.prefetch.fetcher import Fetcher
from coldstart.weights.prefetch.rate_limits import FetchRateLimiter
from coldstart.weights.prefetch.schedule import CheckState, Lease, join
from coldstart.weights.prefetch.sources import compute_weights_key, normalize_address

_LOCK_TIMEOUT_S = 10.0
# Interval in seconds at which the process checks whether clients have disconnected.
_POLL_INTERVAL_S = 1.0
# Each worker copies the weights, and needs at least as much memory as the prefetcher.
_MEMORY_SHARE = 0.5


class _Attach(msgspec.Struct):
    source: str
    environment: dict[str, str] = {}
    rate_limit: LimitedFetch | None = None
    early: bool = False
    events: str | None = None


class PrefetchServer:
    """Server for the clients of one prefetcher. The condition `changed` protects their state and the fetch."""

    def __init__(self) -> None:
        self.idle_s, self.patience_s = PREFETCH_IDLE_S.read(), PREFETCH_PATIENCE_S.read()
        self.streams, memory = int(PREFETCH_STREAMS.read()), int(PREFETCH_MEMORY_BYTES.read())
        self.budget = memory if memory >= 0 else int(_MEMORY_SHARE * processes.read_available_memory())
        self.changed = Condition()
        self.fetcher: Fetcher | None = None
        self.clients = 0
        self._quiet_since = time.monotonic()
        self._limiters = dict[
            str, FetchRateLimiter
        ]()  # by the name of the fetch, or "" for fetches without a limit

    def run(self, listener: peers.Listener) -> None:
        """Accept clients until there has been none for `idle_s` seconds."""
        while self._is_needed():
            if await_readable(listener, timeout_s=_POLL_INTERVAL_S) and (connection := listener.accept()):
                self.serve_client(connection)

    def _is_needed(self) -> bool:
        with self.changed:
            idle_s = 0.0 if self.fetcher is None else self.idle_s
            return self.clients > 0 or time.monotonic() - self._quiet_since < idle_s

    def serve_client(self, connection: socket.socket) -> None:
        """Serve a client's connection in a new thread. The listener accepts only processes of this user."""
        with self.changed:
            self.clients += 1
        Thread(target=self._serve, args=(_Client(self, Channel(connection)),), daemon=True).start()

    def _serve(self, client: _Client) -> None:
        try:
            with client.channel, suppress(OSError):
                client.answer_all()
        finally:
            with self.changed:
                if self.fetcher is not None and client.lease is not None:
                    self.fetcher.release_lease(client.lease)
                self.clients, self._quiet_since = self.clients - 1, time.monotonic()

    def find_fetcher(self, source: str, plan: bytes) -> Fetcher:
        """Return the fetcher for this source and plan.

        Raises PrefetchRefusedError if this process fetches different weights.
        """
        address = normalize_address(source)
        if self.fetcher is None:
            self.fetcher = Fetcher(
                address,
                plan,
                self.changed,
                streams=self.streams,
                budget=self.budget,
                patience_s=self.patience_s,
            )
        if self.fetcher.key != compute_weights_key(address, plan):
            raise PrefetchRefusedError(
                "this prefetcher fetches weights from another source or with another plan"
            )
        return self.fetcher

    def get_shared_limiter(self, rate_limit: LimitedFetch | None) -> FetchRateLimiter:
        """Return the rate limiter shared by all leases of a named fetch."""
        name, rate = ("", None) if rate_limit is None else (rate_limit.name, rate_limit.rate)
        return self._limiters.setdefault(name, FetchRateLimiter(rate))

    def set_rate_limit(self, request: LimitedFetch) -> dict[str, Any] | None:
        """Change the rate limit of a fetch. Return its progress and whether it has ended, or None if it has not begun."""
        if self.fetcher is None or (limiter := self._limiters.get(request.name)) is None:
            return None
        limiter.set_rate(request.rate)
        return {**limiter.document(), "ended": self.fetcher.has_fetch_ended(limiter)}

    def status(self) -> dict[str, Any]:
        """Return the entry of this prefetcher for `coldstart prefetch status`."""
        own = {"pid": os.getpid(), "idle_s": self.idle_s, "clients": self.clients}
        return own | (self.fetcher.document() if self.fetcher is not None else {})


class _Client:
    """Connection of a client, and its lease. `known` is the number of settled checks that were reported to the client."""

    def __init__(self, service: PrefetchServer, channel: Channel) -> None:
        self.service, self.channel = service, channel
        self.lease: Lease | None = None
        self.known = 0

    def answer_all(self) -> None:
        """Handle requests until the connection closes or a request is rejected. Raises OSError."""
        try:
            while (messages := self.channel.receive()) is not None:
                for message in messages:
                    self._answer(message)
        except (json_lines.MalformedMessageError, msgspec.MsgspecError, PrefetchRefusedError) as error:
            self.channel.send({"refused": str(error)})

    def _answer(self, message: dict[str, Any]) -> None:
        operation, service = message.get("op"), self.service
        if operation == "attach":
            self._attach(msgspec.convert(message, _Attach))
        elif operation == "wait" and self.lease is not None and service.fetcher is not None:
            self._wait(service.fetcher)
        elif operation == "free" and self.lease is not None and service.fetcher is not None:
            with service.changed:
                service.fetcher.free_tensor(self.lease, str(message.get("tensor")))
        elif operation in ("rate_limit", "status"):
            with service.changed:
                response = (
                    service.set_rate_limit(msgspec.convert(message, LimitedFetch))
                    if operation == "rate_limit"
                    else service.status()
                )
            self.channel.send({operation: response})
        elif operation == "stop":
            self.channel.send({"stopped": os.getpid()})
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            raise json_lines.MalformedMessageError(f"unknown operation {str(operation)[:40]!r}")

    def _attach(self, request: _Attach) -> None:
        names, plan = json_lines.read_body(self.channel.take_descriptor())
        if self.lease is not None:
            raise json_lines.MalformedMessageError("received a second attach message")
        began, wanted = timeline.now(), msgspec.json.decode(names, type=list[str] | None)
        with self.service.changed:
            fetcher, limiter = (
                self.service.find_fetcher(request.source, plan),
                self.service.get_shared_limiter(request.rate_limit),
            )
            self.lease = fetcher.create_lease(
                wanted, limiter, request.environment, limits=request.rate_limit, early=request.early
            )
            self.known, ready = len(fetcher.board.settled), join(fetcher.board.list_checks(CheckState.READY))
        if request.early:
            self._hold_early_lease(fetcher, self.lease, began, request.events)
            return
        region = () if fetcher.region is None else (fetcher.region.open_reader(),)
        try:
            self.channel.send({"attached": fetcher.key, "ready": ready}, region)
        finally:
            for descriptor in region:
                os.close(descriptor)

    def _wait(self, fetcher: Fetcher) -> None:
        """Respond as soon as a check changes to a state that the client does not know."""
        board = fetcher.board
        with self.service.changed:
            fetcher.waiting += 1
            self.service.changed.notify_all()
            try:
                self._wait_while(lambda: self.known == len(board.settled))
            finally:
                fetcher.waiting -= 1
            news, self.known = sorted(set(board.settled[self.known :])), len(board.settled)
            ready = join(board.list_checks(CheckState.READY, news))
            failed = [(number, board.reasons[number]) for number in news if number in board.reasons]
        self.channel.send({"ready": ready, "failed": failed})

    def _hold_early_lease(self, fetcher: Fetcher, lease: Lease, began: float, events: str | None) -> None:
        """Hold an early lease until it ends, and write the timeline span of its fetch. The client expects no response."""
        with self.service.changed:
            fetches = fetcher.board.is_unfinished(lease)
            self._wait_while(lambda: fetcher.board.is_unfinished(lease))
            if fetches and not fetcher.board.is_unfinished(lease) and events is not None:
                _write_span(fetcher, events, began)
            self._wait_while(lambda: lease in fetcher.leases)
        with suppress(OSError):
            self.channel.socket.shutdown(socket.SHUT_RDWR)

    def _wait_while(self, waits: Callable[[], bool]) -> None:
        # A client sends nothing while it waits for a response: its socket is readable when it has disconnected.
        while waits() and not await_readable(self.channel, timeout_s=0):
            self.service.changed.wait(_POLL_INTERVAL_S)


def _write_span(fetcher: Fetcher, path: str, began: float) -> None:
    figures = fetcher.document()
    brief = {name: figures[name] for name in ("source", "fetched_bytes", "ready_bytes")}
    try:
        timeline.append_span(path, timeline.Span("fetch weights", began, timeline.now(), "prefetch", brief))
    except OSError as error:
        fetcher.record_error(f"cannot write the timeline events: {error}")


def main(path: Path, descriptor: int) -> None:
    """Serve until a stop request or the idle timeout.

    Args:
        path: Socket to listen on.
        descriptor: Connection of the client that started this process.
    """
    client = socket.socket(fileno=descriptor)
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while not _try_lock(path.with_suffix(".lock")):
        if _is_served(path) or time.monotonic() > deadline:
            return
        time.sleep(0.01)
    failed = True
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        threading.excepthook = _fail
        service, listener = PrefetchServer(), peers.Listener(path)
        service.serve_client(client)
        service.run(listener)
        failed = False
    except SystemExit:
        failed = False
    except Exception:  # noqa: BLE001 - the log explains the error to the client
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        for suffix in (".socket", ".lock") if failed else (".log", ".socket", ".lock"):
            path.with_suffix(suffix).unlink(missing_ok=True)
        # Exit without joining the streams: they may block in a read from a server.
        os._exit(failed)


def _fail(failed: threading.ExceptHookArgs) -> None:
    """Exit after an error in a thread, so that clients load from files instead of waiting."""
    traceback.print_exception(failed.exc_value)
    os._exit(1)


def _try_lock(path: Path) -> bool:
    """Lock the file until this process exits. Return False if another process holds the lock or removed the file."""
    handle = files.try_lock(path)
    if handle is None:
        return False
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(handle), path.stat()):
            return True
    os.close(handle)
    return False


def _is_served(path: Path) -> bool:
    with suppress(peers.PeerError):
        peers.connect(path).close()
        return True
    return False


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
