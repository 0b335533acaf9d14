"""What a source of weights is: it reads byte ranges of named files.

Each stream opens its own, so none needs to be safe for threads. What may pass is SourceUnavailableError (and tried again),
what will
not is SourceUnusableError.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from coldstart.artifacts.net.origin import without_secrets

Count = Callable[[int], None]
SCHEMES = ("http", "https", "s3", "hf")


class SourceUnavailableError(Exception):
    """It does not answer, or broke off; it may come back."""


class SourceTooSlowError(SourceUnavailableError):
    """It answers slower than the floor: not asked again at once."""


class SourceChangedError(SourceUnavailableError):
    """Another file than a moment ago: what came before belongs to the old one."""


class SourceUnusableError(Exception):
    """It answers, and the answer will not change: no such file, no byte ranges, another size, no permission."""


class RangeSource(Protocol):
    """Byte ranges of files."""

    def read(self, name: str, size: int, start: int, buffer: memoryview, count: Count) -> int:
        """Fill `buffer` from byte `start` of file `name`, which has `size` bytes; how many bytes came before it broke off.

        Calls `count` with every number of bytes received. Raises SourceUnavailableError when none came, and
        SourceUnusableError.
        """

    def version(self, name: str) -> str:
        """What the source called the file's content when it was last read from, "" where it says nothing."""
        ...

    def close(self) -> None:
        """Close its connections."""


def is_local(address: str) -> bool:
    """Whether the address is a directory of this machine."""
    return address.partition("://")[0] not in SCHEMES


def origin(address: str) -> str:
    """Who serves the address: what it begins with as others do that are served by the same."""
    scheme, mark, rest = address.partition("://")
    return address if is_local(address) else f"{scheme}{mark}{rest.partition('/')[0]}"


def normal(address: str) -> str:
    """The address as the prefetcher takes it: absolute for a directory, without a slash at its end."""
    return str(Path(address).expanduser().absolute()) if is_local(address) else address.rstrip("/")


def shown(address: str) -> str:
    """The address without a login and without its query, which may be a signature."""
    return address if is_local(address) else without_secrets(address)
