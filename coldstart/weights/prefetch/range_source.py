"""Interface of a weights source: it reads byte ranges of named files.

Each stream opens its own source, so a source need not be thread-safe. SourceUnavailableError is temporary and
the read is retried; SourceUnusableError is permanent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

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
