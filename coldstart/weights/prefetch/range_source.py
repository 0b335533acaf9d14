"""Sources of weights, which read byte ranges of named files: a local directory, HTTP, an S3-compatible store or the hub.

Each stream opens its own source, so a source need not be thread-safe. SourceUnavailableError is temporary and
the read is retried; SourceUnusableError is permanent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from coldstart.artifacts import files
from coldstart.artifacts.net.origin import redact_url
from coldstart.system import paths

Count = Callable[[int], None]
SCHEMES = ("http", "https", "s3", "hf")


class SourceUnavailableError(Exception):
    """The source did not answer or closed the connection; a retry may succeed."""


class SourceTooSlowError(SourceUnavailableError):
    """The source sends fewer bytes per second than the minimum; it is not retried at once."""


class SourceUnusableError(Exception):
    """The source answers with a permanent error: no such file, no byte ranges, another size or no permission."""


class RangeSource(Protocol):
    """Source of byte ranges of files."""

    def read(self, name: str, size: int, start: int, buffer: memoryview, count: Count) -> int:
        """Fill `buffer` from byte `start` of file `name`; return how many bytes arrived before the connection ended.

        Args:
            name: File name.
            size: Size of the file in bytes.
            start: Offset of the first byte.
            buffer: Memory for the bytes.
            count: Called with each number of received bytes.

        Raises:
            SourceUnavailableError: No byte arrived.
            SourceUnusableError: The source cannot provide the range.
        """

    def close(self) -> None:
        """Close the connections."""


def is_local(address: str) -> bool:
    """Return whether the address is a directory of this machine."""
    return address.partition("://")[0] not in SCHEMES


def normalise(address: str) -> str:
    """Return the address in the prefetcher's form: absolute for a directory, otherwise without a trailing slash."""
    return str(paths.expand(address).absolute()) if is_local(address) else address.rstrip("/")


def redact(address: str) -> str:
    """Return the address for messages: without a login, and without the query, which may be a signature."""
    return address if is_local(address) else redact_url(address)


def open_source(address: str, environment: Mapping[str, str]) -> RangeSource:
    """Open a source for one stream; `environment` has the client's credentials. Raises SourceUnusableError."""
    scheme = address.partition("://")[0]
    if scheme in ("http", "https"):
        from coldstart.weights.prefetch.http_source import HttpSource, headers

        return HttpSource(address, headers(address, environment))
    if scheme == "s3":
        from coldstart.weights.prefetch.object_source import ObjectSource

        return ObjectSource(address, environment)
    if scheme == "hf":
        from coldstart.weights.prefetch.object_source import hub_source

        return hub_source(address, environment)
    return LocalSource(Path(address))


class LocalSource:
    """Local directory, read into the page cache, which is the copy that all clients map."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: dict[str, int] = {}

    def read(self, name: str, size: int, start: int, buffer: memoryview, count: Count) -> int:
        """Implement RangeSource."""
        try:
            descriptor = self._descriptor(name, size)
            # Ask the disk for the full range at once: the kernel's readahead would send many short requests.
            os.posix_fadvise(descriptor, start, len(buffer), os.POSIX_FADV_WILLNEED)
            got = os.preadv(descriptor, [buffer], start)
        except OSError as error:
            raise SourceUnusableError(f"{self.directory / name}: {error.strerror}") from error
        if not got:
            raise SourceUnusableError(f"{self.directory / name} became shorter while it was read")
        count(got)
        return got

    def _descriptor(self, name: str, size: int) -> int:
        if name not in self._open:
            descriptor = files.open_descriptor(self.directory / name)
            self._open[name] = descriptor
            if (actual := os.fstat(descriptor).st_size) != size:
                raise SourceUnusableError(
                    f"{self.directory / name} has {actual} bytes, but the weights plan has {size}"
                )
        return self._open[name]

    def close(self) -> None:
        """Implement RangeSource."""
        while self._open:
            os.close(self._open.popitem()[1])
