"""Lease on a model's weights: wait for bytes, map the files, and query their state.

Files are slices of a private mapping of the shared region, or mapped local files.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from coldstart.artifacts import files
from coldstart.system.ipc.json_lines import Channel
from coldstart.weights.prefetch import PrefetchFailedError, PrefetchLostError, PrefetchRefusedError
from coldstart.weights.prefetch.layout import RegionLayout
from coldstart.weights.prefetch.sources import is_local

# An overloaded prefetcher must not keep its clients from falling back to their next source.
ANSWER_S = 30.0
# A private writable mapping reserves memory for copies, and no client makes any.
_FLAGS = mmap.MAP_PRIVATE | 0x4000  # MAP_NORESERVE; mmap defines it from Python 3.13


class WeightsLease(AbstractContextManager["WeightsLease"]):
    """Lease on the weights of one plan. It is a context manager, and may be used by one thread only."""

    def __init__(self, channel: Channel, layout: RegionLayout, wanted: Iterable[int], source: str) -> None:
        self._channel, self._layout, self._wanted = channel, layout, frozenset(wanted)
        self._ready, self._failed = set[int](), dict[int, str]()
        channel.socket.settimeout(ANSWER_S)
        self._receive()
        channel.socket.settimeout(None)  # a source may be slow, so waiting for bytes has no time limit
        self._directory, self._views = Path(source), dict[str, memoryview]()
        self._region = (
            None if is_local(source) else memoryview(_map(channel.take_descriptor(), layout.total_bytes))
        )

    def map_file(self, name: str) -> memoryview:
        """Return all bytes of a file as a writable private mapping.

        Raises:
            KeyError: The plan has no such file.
            OSError: The file of a local source cannot be mapped.
            ValueError: The file of a local source is shorter than in the plan.
        """
        file = self._layout.files[name]
        if self._region is not None:
            return self._region[file.region_offset : file.region_offset + file.size]
        if file.size and name not in self._views:
            self._views[name] = memoryview(_map(files.open_descriptor(self._directory / name), file.size))
        return self._views.get(name, memoryview(b""))

    def wait_for_bytes(self, file: str, offset: int, size: int) -> None:
        """Block until bytes [offset, offset + size) of `file` are fetched and verified.

        Raises:
            PrefetchLostError: The prefetcher exited before that.
            PrefetchFailedError: The prefetcher could not fetch some of the bytes.
            PrefetchRefusedError: This lease did not request all of the bytes.
        """
        end, fits = offset + size, 0 <= offset <= offset + size <= self._layout.files[file].size
        if not fits or not self._wanted.issuperset(
            numbers := self._layout.find_covering_checks(file, offset, size)
        ):
            raise PrefetchRefusedError(f"this client did not request bytes {offset} to {end} of {file}")
        self._await(numbers)

    def wait_for_tensors(self) -> None:
        """Block until all bytes that this client requested are available. Raises the errors of `wait_for_bytes`."""
        for number in sorted(self._wanted):
            self._await((number,))

    def has_tensor(self, name: str) -> bool:
        """Return whether all bytes of a tensor are known to be available."""
        return self._ready.issuperset(self._layout.tensors[name])

    def free_tensor(self, name: str) -> None:
        """Let the prefetcher free a tensor of which no view exists anymore, unless other clients may read it."""
        self._wanted -= frozenset(self._layout.tensors[name])
        self._channel.try_send({"op": "free", "tensor": name})

    def query_stats(self) -> dict[str, Any]:
        """Return the prefetcher's entry in `coldstart prefetch status`.

        The counts are bytes of this model, summed over all clients. `began` and `ended` are times in seconds on
        CLOCK_MONOTONIC, or None. Raises PrefetchLostError.
        """
        return dict(self._ask("status")["status"])

    def close(self) -> None:
        """Release the lease. Mapped files stay readable as long as a view of them exists."""
        self._channel.close()
        self._views.clear()
        self._region = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _await(self, numbers: Collection[int]) -> None:
        """Block until the checks are ready. Raises the errors of `wait_for_bytes`."""
        while not self._ready.issuperset(numbers):
            if failed := self._failed.keys() & set(numbers) - self._ready:
                raise PrefetchFailedError(self._failed[min(failed)])
            self._ask("wait")

    def _ask(self, operation: str) -> dict[str, Any]:
        try:
            self._channel.send({"op": operation})
        except OSError as error:
            raise PrefetchLostError(
                f"cannot send {operation!r} to the prefetcher: the prefetcher has exited"
            ) from error
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        """Receive a response, record the states of checks in it, and return it. Raises the error that ends the connection."""
        answer = next(self._channel.iterate_replies(), None)
        if answer is None:
            raise PrefetchLostError(
                "cannot fetch the weights: the prefetcher has exited or closed the connection"
            )
        if "refused" in answer:
            raise PrefetchRefusedError(str(answer["refused"]))
        for first, stop in answer.get("ready", ()):
            self._ready.update(range(first, stop))
        self._failed |= dict(answer.get("failed", ()))
        return answer


def _map(descriptor: int, size: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, size, flags=_FLAGS)
    finally:
        os.close(descriptor)
