"""Two sources of tensors behind one interface: shared memory that a prefetcher fills, and mapped files.

`get_bytes` blocks until the bytes are available. It returns a view without a copy, which is valid as long as a
reference to it exists.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

from coldstart.artifacts import files
from coldstart.models.checkpoint_files import Tensor
from coldstart.system.proc import own_process
from coldstart.weights.prefetch import PrefetchError

if TYPE_CHECKING:
    from coldstart.weights.prefetch.attached import WeightsLease

# Size of one page-in read: long enough to fill a disk's queue, short enough to get ahead of the first tensor.
PIECE = 4 << 20
# A disk with a queue is faster with several readers, and they use little CPU time.
READERS = 4


class SourceLostError(RuntimeError):
    """Error for a source that can deliver no more bytes. The message states the reason."""


class PrefetchSource:
    """Source that reads the shared memory that the prefetcher fills.

    With `frees_loaded`, the prefetcher frees the memory of each tensor as soon as no reference to its view exists.
    """

    def __init__(self, attached: WeightsLease, *, frees_loaded: bool = False) -> None:
        self.attached, self.frees_loaded = attached, frees_loaded
        self._loaded = deque[str]()

    def sort_tensors(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors in the order in which to load them. To free memory early, available ones are the first."""
        return sorted(tensors, key=lambda one: self.frees_loaded and not self.attached.has_tensor(one.name))

    def get_bytes(self, tensor: Tensor) -> memoryview:
        """Wait until the bytes of the tensor are fetched and verified, and return a view of them."""
        self._free_loaded()
        try:
            self.attached.wait_for_bytes(tensor.file, tensor.offset, tensor.size)
            view = self.attached.map_file(tensor.file)[tensor.offset : tensor.offset + tensor.size]
        except (PrefetchError, KeyError) as error:
            raise SourceLostError(str(error)) from error
        own_process.populate_pages(view)
        if self.frees_loaded:  # PyTorch's tensors refer to the view until the last of them is freed
            weakref.finalize(view, self._loaded.append, tensor.name).atexit = False
        return view

    def _free_loaded(self) -> None:
        while self._loaded:
            self.attached.free_tensor(self._loaded.popleft())

    def get_fetch_stats(self) -> dict[str, Any]:
        """Return the prefetcher's statistics of this model, summed over all clients."""
        try:
            return self.attached.query_stats()
        except PrefetchError:
            return {}

    def close(self) -> None:
        """Release the lease."""
        self._free_loaded()
        self.attached.close()


class FileSource:
    """Source that maps files privately. With `ahead`, background threads read their pages in the order of the tensors.

    A tensor with a digest is verified, because the files then replace a prefetcher, which delivers only verified bytes.
    """

    def __init__(self, paths: Mapping[str, Path], tensors: Sequence[Tensor], ahead: bool = True) -> None:
        self.paths, self.ahead = paths, ahead
        self._maps: dict[str, memoryview] = {}
        self._reading = PageIn(paths, tensors) if ahead else None

    def sort_tensors(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors in the order in which to load them."""
        return list(tensors)

    def get_bytes(self, tensor: Tensor) -> memoryview:
        """Return a view of the tensor's bytes in the mapped file."""
        try:
            view = self._mapped(tensor.file)
        except (OSError, ValueError, KeyError) as error:
            raise SourceLostError(f"cannot map {tensor.file}: {error}") from error
        if tensor.offset + tensor.size > len(view):
            raise SourceLostError(f"{tensor.file} is truncated: it ends before tensor {tensor.name}")
        data = view[tensor.offset : tensor.offset + tensor.size]
        if self.ahead:
            own_process.populate_pages(data)
        if tensor.digest and tensor.digest != "sha256:" + hashlib.sha256(data).hexdigest():
            raise SourceLostError(
                f"tensor {tensor.name} at offset {tensor.offset} of {tensor.file} does not match its digest in the plan"
            )
        return data

    def _mapped(self, name: str) -> memoryview:
        if name not in self._maps:
            with files.open_regular(self.paths[name]) as file:
                self._maps[name] = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        return self._maps[name]

    def get_fetch_stats(self) -> dict[str, Any]:
        """Return {}, because nothing is fetched."""
        return {}

    def close(self) -> None:
        """Stop the page-in and release the mappings."""
        if self._reading is not None:
            self._reading.end()
        self._maps.clear()


TensorSource = PrefetchSource | FileSource


class PageIn:
    """Threads that read the bytes of tensors into the page cache, in order.

    A file that cannot be read is skipped, because the code that maps it reports the error.
    """

    def __init__(self, paths: Mapping[str, Path], tensors: Sequence[Tensor]) -> None:
        self.paths, self._pieces, self._lock, self._ended = paths, _pieces(tensors), Lock(), False
        self._threads = [Thread(target=self._read, name="page in", daemon=True) for _ in range(READERS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Stop the threads and wait for them, because a process that will be forked must have no other threads."""
        with self._lock:
            self._ended = True
        for thread in self._threads:
            thread.join()

    def _read(self) -> None:
        buffer = memoryview(bytearray(PIECE))
        while piece := self._following():
            name, offset, size = piece
            with suppress(OSError, KeyError), files.open_regular(self.paths[name]) as file:
                # Otherwise, the kernel's readahead would read beyond the range, into tensors of other ranks.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                if not _cached(file.fileno(), offset, size):
                    os.preadv(file.fileno(), [buffer[:size]], offset)

    def _following(self) -> tuple[str, int, int] | None:
        with self._lock:
            return None if self._ended else next(self._pieces, None)


def _cached(descriptor: int, offset: int, size: int) -> bool:
    """Return whether both ends of the range are in the page cache. A read that would wait for the disk counts as no."""
    try:
        for place in (offset, offset + size - 1):
            os.preadv(descriptor, [bytearray(1)], place, os.RWF_NOWAIT)
    except OSError:
        return False  # EAGAIN, or a file system without RWF_NOWAIT
    return True


def _pieces(tensors: Sequence[Tensor]) -> Iterator[tuple[str, int, int]]:
    for tensor in tensors:
        for start in range(0, tensor.size, PIECE):
            yield tensor.file, tensor.offset + start, min(PIECE, tensor.size - start)
