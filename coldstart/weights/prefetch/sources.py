"""Where weights come from: a local directory, an HTTP server, an S3-compatible store, the Hugging Face hub.

A source reads byte ranges of named files. Each stream opens its own, so none needs to be safe for threads. What may pass
is Unavailable (and tried again), what will not is Unusable.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from coldstart.artifacts.net.origin import without_secrets

Count = Callable[[int], None]
SCHEMES = ("http", "https", "s3", "hf")


class Unavailable(Exception):
    """It does not answer, or broke off; it may come back."""


class TooSlow(Unavailable):
    """It answers slower than the floor: not asked again at once."""


class Changed(Unavailable):
    """Another file than a moment ago: what came before belongs to the old one."""


class Unusable(Exception):
    """It answers, and the answer will not change: no such file, no byte ranges, another size, no permission."""


class Source(Protocol):
    """Byte ranges of files."""

    def read(self, name: str, size: int, start: int, into: memoryview, count: Count) -> int:
        """Fill `into` from byte `start` of file `name`, which has `size` bytes; how many bytes came before it broke off.

        Calls `count` with every number of bytes received. Raises Unavailable when none came, and Unusable.
        """

    def version(self, name: str) -> str:
        """What the source called the file's content when it was last read from, "" where it says nothing."""
        ...

    def close(self) -> None:
        """Close its connections."""


def is_local(address: str) -> bool:
    """Whether the address is a directory of this machine."""
    return address.partition("://")[0] not in SCHEMES


def normal(address: str) -> str:
    """The address as the prefetcher takes it: absolute for a directory, without a slash at its end."""
    return str(Path(address).expanduser().absolute()) if is_local(address) else address.rstrip("/")


def shown(address: str) -> str:
    """The address without a login and without its query, which may be a signature."""
    return address if is_local(address) else without_secrets(address)


def open_source(address: str, environment: Mapping[str, str]) -> Source:
    """A new source for one stream; `environment` is that of the client. Raises Unusable."""
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
    """Brings files into the page cache, which is the copy that everybody maps."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: dict[str, int] = {}

    def read(self, name: str, size: int, start: int, into: memoryview, count: Count) -> int:
        """As Source."""
        try:
            descriptor = self._descriptor(name, size)
            # One long request to the disk, where the kernel's own reading ahead would make many short ones.
            os.posix_fadvise(descriptor, start, len(into), os.POSIX_FADV_WILLNEED)
            got = os.preadv(descriptor, [into], start)
        except OSError as error:
            raise Unusable(f"{self.directory / name}: {error.strerror}") from error
        if not got:
            raise Unusable(f"{self.directory / name} has become shorter")
        count(got)
        return got

    def version(self, name: str) -> str:
        """As Source: a file that is open stays what it is."""
        return ""

    def _descriptor(self, name: str, size: int) -> int:
        if name not in self._open:
            descriptor = os.open(self.directory / name, os.O_RDONLY | os.O_CLOEXEC)
            self._open[name] = descriptor
            if (found := os.fstat(descriptor).st_size) != size:
                raise Unusable(f"{self.directory / name} has {found} bytes, the weights plan says {size}")
        return self._open[name]

    def close(self) -> None:
        """As Source."""
        while self._open:
            os.close(self._open.popitem()[1])
