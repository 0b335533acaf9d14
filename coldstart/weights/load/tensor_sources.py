"""Two places that tensors come from, one interface: shared memory that a prefetcher fills, and mapped files.

`bytes_of` returns a view without a copy, valid as long as somebody holds it, and returns only when its bytes are there.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

from coldstart.system.proc import memory
from coldstart.weights.load.tensors import Tensor

if TYPE_CHECKING:
    from coldstart.weights.prefetch.client import Attached

# One read of the page-in: long enough for a disk's queue, short enough to be ahead of the first tensor soon.
PIECE = 4 << 20
# Readers of the page-in; a disk with a queue wants several, and they hardly use a processor.
READERS = 4


class SourceLostError(RuntimeError):
    """This source will give no more bytes; the message says why."""


class TensorSource(ABC):
    """Where the bytes of tensors come from."""

    @abstractmethod
    def bytes_of(self, tensor: Tensor) -> memoryview:
        """The tensor's bytes, once they are there. Raises Lost."""

    def fetched(self) -> dict[str, Any]:
        """What was moved to get the bytes here, {} where nothing was."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; views that are still held stay valid."""


class PrefetchSource(TensorSource):
    """The prefetcher's shared memory."""

    def __init__(self, attached: Attached) -> None:
        self.attached = attached
        self._files: dict[str, memoryview] = {}
        self._addresses: dict[str, int] = {}

    def bytes_of(self, tensor: Tensor) -> memoryview:
        """As TensorSource; blocks until the bytes are fetched and verified."""
        from coldstart.weights.prefetch.errors import PrefetchError

        try:
            self.attached.wait(tensor.file, tensor.offset, tensor.size)
            if tensor.file not in self._files:
                self._files[tensor.file] = self.attached.file(tensor.file)
                self._addresses[tensor.file] = memory.address(self._files[tensor.file])
        except (PrefetchError, KeyError) as error:
            raise SourceLostError(str(error)) from error
        memory.present(self._addresses[tensor.file] + tensor.offset, tensor.size)
        return self._files[tensor.file][tensor.offset : tensor.offset + tensor.size]

    def fetched(self) -> dict[str, Any]:
        """As TensorSource: the prefetcher's account of this model, by all its clients."""
        from coldstart.weights.prefetch.errors import PrefetchError

        try:
            return self.attached.stats()
        except PrefetchError:
            return {}

    def close(self) -> None:
        """As TensorSource; gives the lease back."""
        self._files.clear()
        self.attached.close()


class FileSource(TensorSource):
    """The files themselves, mapped privately. With `ahead`, their pages are read in the order of the tensors meanwhile.

    A tensor with a digest is checked against it: the files then stand in for a source whose bytes were promised.
    """

    def __init__(self, paths: Mapping[str, Path], tensors: Sequence[Tensor], ahead: bool = True) -> None:
        self.paths, self.ahead = paths, ahead
        self._maps: dict[str, memoryview] = {}
        self._addresses: dict[str, int] = {}
        self._reading = PageIn(paths, tensors) if ahead else None

    def bytes_of(self, tensor: Tensor) -> memoryview:
        """As TensorSource."""
        try:
            view = self._mapped(tensor.file)
        except (OSError, ValueError, KeyError) as error:
            raise SourceLostError(f"{tensor.file} cannot be mapped: {error}") from error
        if tensor.offset + tensor.size > len(view):
            raise SourceLostError(f"{tensor.file} is cut short: {tensor.name} ends after it")
        if self.ahead:
            memory.present(self._addresses[tensor.file] + tensor.offset, tensor.size)
        data = view[tensor.offset : tensor.offset + tensor.size]
        if tensor.digest and tensor.digest != "sha256:" + hashlib.sha256(data).hexdigest():
            raise SourceLostError(
                f"{tensor.file} holds other bytes for {tensor.name} at {tensor.offset} than the plan says"
            )
        return data

    def _mapped(self, name: str) -> memoryview:
        if name not in self._maps:
            with self.paths[name].open("rb") as file:
                self._maps[name] = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
            self._addresses[name] = memory.address(self._maps[name])
        return self._maps[name]

    def close(self) -> None:
        """As TensorSource; also ends the reading ahead."""
        if self._reading is not None:
            self._reading.end()
        self._maps.clear()


class PageIn:
    """Threads of this process that read tensors' bytes into the page cache, in order.

    A file that cannot be read is passed over: whoever maps it will say so.
    """

    def __init__(self, paths: Mapping[str, Path], tensors: Sequence[Tensor]) -> None:
        self.paths, self._pieces, self._lock, self._ended = paths, _pieces(tensors), Lock(), False
        self._threads = [Thread(target=self._read, name="page in", daemon=True) for _ in range(READERS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Stop, and wait until no thread is left (a process that will be forked must have none)."""
        with self._lock:
            self._ended = True
        for thread in self._threads:
            thread.join()

    def _read(self) -> None:
        buffer = memoryview(bytearray(PIECE))
        while piece := self._following():
            name, offset, size = piece
            with suppress(OSError, KeyError), self.paths[name].open("rb", buffering=0) as file:
                # The kernel would read on behind the range, into other ranks' tensors.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                if not _cached(file.fileno(), offset, size):
                    os.preadv(file.fileno(), [buffer[:size]], offset)

    def _following(self) -> tuple[str, int, int] | None:
        with self._lock:
            return None if self._ended else next(self._pieces, None)


def _cached(descriptor: int, offset: int, size: int) -> bool:
    """Whether both ends of the range are in the page cache: a read that may not wait says so."""
    try:
        for place in (offset, offset + size - 1):
            os.preadv(descriptor, [bytearray(1)], place, os.RWF_NOWAIT)
    except OSError:
        return False  # EAGAIN, or a file system that does not know the question
    return True


def _pieces(tensors: Sequence[Tensor]) -> Iterator[tuple[str, int, int]]:
    for tensor in tensors:
        for start in range(0, tensor.size, PIECE):
            yield tensor.file, tensor.offset + start, min(PIECE, tensor.size - start)
