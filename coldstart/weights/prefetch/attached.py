"""Lease on a model's weights: wait for bytes, map their files, and query their state.

Files are slices of a private mapping of the shared region, or mapped local files.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from coldstart.artifacts import files
from coldstart.system.ipc import peers
from coldstart.system.ipc.json_lines import Channel
from coldstart.system.proc import processes
from coldstart.weights.prefetch import PrefetchFailedError, PrefetchLostError, PrefetchRefusedError
from coldstart.weights.prefetch.layout import RegionLayout
from coldstart.weights.prefetch.sources import is_local

# A prefetcher that is stopped or overloaded must not keep its clients from their next source.
ANSWER_S = 30.0
# Interval in seconds between checks; a prefetcher that is stopped at two checks in a row is killed.
CHECK_S = 2.0
# A private writable mapping reserves memory for copies, and no client makes any.
_FLAGS = mmap.MAP_PRIVATE | 0x4000  # MAP_NORESERVE; mmap defines it from Python 3.13


class Attached:
    """Lease on the weights of one plan: a context manager, for one thread."""

    def __init__(self, channel: Channel, layout: RegionLayout, wanted: Iterable[int], source: str) -> None:
        self._channel, self._layout, self._wanted = channel, layout, frozenset(wanted)
        self._ready, self._failed = set[int](), dict[int, str]()
        self._answers: dict[str, list[dict[str, Any]]] = {"attached": [], "stats": []}
        self._refused: str | None = None
        self._end_reason = "The prefetcher has ended or does not answer."
        self._pid, self._limit_s = peers.peer_pid(channel.socket), ANSWER_S
        # Over a socket pair, the kernel names this process as the peer. A source may be slow, so bytes have no limit.
        self._pid, self._limit_s = int(self._take("attached")["pid"]), inf
        self._directory, self._views = Path(source), dict[str, memoryview]()
        self._region = None if is_local(source) else memoryview(_map(channel.take(), layout.total))

    def file(self, name: str) -> memoryview:
        """Return all bytes of a file, writable and privately mapped.

        Raises:
            KeyError: The plan has no such file.
            OSError: The file of a local source cannot be mapped.
            ValueError: The file of a local source is shorter than in the plan.
        """
        file = self._layout.files[name]
        if name not in self._views:
            if self._region is not None:
                self._views[name] = self._region[file.base : file.base + file.size]
            elif file.size:
                self._views[name] = memoryview(_map(files.open_descriptor(self._directory / name), file.size))
            else:
                self._views[name] = memoryview(b"")
        return self._views[name]

    def wait(self, file: str, offset: int, size: int) -> None:
        """Block until bytes [offset, offset + size) of `file` are fetched and verified.

        Raises:
            PrefetchLostError: The prefetcher ended first.
            PrefetchFailedError: The prefetcher stopped trying to fetch some of the bytes.
            PrefetchRefusedError: This lease did not request all of the bytes.
        """
        end, fits = offset + size, 0 <= offset <= offset + size <= self._layout.files[file].size
        if not fits or not self._wanted.issuperset(numbers := self._layout.cover(file, offset, size)):
            raise PrefetchRefusedError(f"this client did not request bytes {offset} to {end} of {file}")
        self._until(lambda: self._has(numbers))

    def complete(self, names: Collection[str] | None = None) -> None:
        """Block until all bytes of the tensors (None: of all files) are available. Raises the errors of `wait`."""
        numbers = self._layout.select(names)
        if not self._wanted.issuperset(numbers):
            raise PrefetchRefusedError("this client did not request all of the tensors")
        for number in numbers:
            self._until(partial(self._has, (number,)))

    def stats(self) -> dict[str, Any]:
        """Return {"fetched_bytes", "wanted_bytes", "ready_bytes", "refetched", "streams", "began", "ended", "errors"}.

        The counts are bytes of this model, summed over all clients. `began` and `ended` are seconds on
        CLOCK_MONOTONIC or None. Raises PrefetchLostError.
        """
        try:
            self._channel.send({"op": "stats"})
        except OSError as error:
            raise PrefetchLostError("the prefetcher has ended") from error
        return dict(self._take("stats")["stats"])

    def close(self) -> None:
        """Release the lease; mapped files stay readable while a view of them exists."""
        self._channel.close()
        self._views.clear()
        self._region = None

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _has(self, numbers: Collection[int]) -> bool:
        if self._ready.issuperset(numbers):
            return True
        if failed := self._failed.keys() & set(numbers) - self._ready:
            raise PrefetchFailedError(self._failed[min(failed)])
        return False

    def _take(self, kind: str) -> dict[str, Any]:
        self._until(lambda: bool(self._answers[kind]))
        return self._answers[kind].pop(0)

    def _until(self, done: Callable[[], bool]) -> None:
        """Read messages until `done`. Raises the error that ended the connection."""
        while not done():
            messages = self._channel.receive(None) if self._await() else None
            self._learn(messages or ())
            if self._refused:
                raise PrefetchRefusedError(self._refused)
            if messages is None:
                raise PrefetchLostError(self._end_reason)

    def _await(self) -> bool:
        """Wait until the socket is readable, and kill a prefetcher that is stopped; return False after the limit."""
        deadline, was_stopped = monotonic() + self._limit_s, False
        while (left := deadline - monotonic()) > 0:
            if select.select([self._channel], [], [], min(left, CHECK_S))[0]:
                return True
            is_stopped = processes.is_stopped(self._pid)
            if is_stopped and was_stopped:
                # The end of the process releases its lock, so that the next client starts another.
                self._end_reason = "The prefetcher was stopped by a signal, and was killed."
                with suppress(OSError):
                    os.kill(self._pid, signal.SIGKILL)
            was_stopped = is_stopped
        return False

    def _learn(self, messages: Iterable[dict[str, Any]]) -> None:
        for message in messages:
            for first, end in message.get("ready", ()):
                self._ready.update(range(first, end))
            for first, end in message.get("failed", ()):
                self._failed |= dict.fromkeys(range(first, end), str(message["reason"]))
            for kind in self._answers.keys() & message.keys():
                self._answers[kind].append(message)
            if "refused" in message:
                self._refused = str(message["refused"])


def _map(descriptor: int, size: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, size, flags=_FLAGS)
    finally:
        os.close(descriptor)
