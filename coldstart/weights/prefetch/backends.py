"""Where weights come from: a local directory, an HTTP server, an S3-compatible store, the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from coldstart.weights.prefetch.range_source import Count, RangeSource, SourceUnusableError


def open_source(address: str, environment: Mapping[str, str]) -> RangeSource:
    """A new source for one stream; `environment` is that of the client. Raises SourceUnusableError."""
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

    def read(self, name: str, size: int, start: int, buffer: memoryview, count: Count) -> int:
        """As RangeSource."""
        try:
            descriptor = self._descriptor(name, size)
            # One long request to the disk, where the kernel's own reading ahead would make many short ones.
            os.posix_fadvise(descriptor, start, len(buffer), os.POSIX_FADV_WILLNEED)
            got = os.preadv(descriptor, [buffer], start)
        except OSError as error:
            raise SourceUnusableError(f"{self.directory / name}: {error.strerror}") from error
        if not got:
            raise SourceUnusableError(f"{self.directory / name} has become shorter")
        count(got)
        return got

    def version(self, name: str) -> str:
        """As RangeSource: a file that is open stays what it is."""
        return ""

    def _descriptor(self, name: str, size: int) -> int:
        if name not in self._open:
            descriptor = os.open(self.directory / name, os.O_RDONLY | os.O_CLOEXEC)
            self._open[name] = descriptor
            if (actual := os.fstat(descriptor).st_size) != size:
                raise SourceUnusableError(
                    f"{self.directory / name} has {actual} bytes, the weights plan says {size}"
                )
        return self._open[name]

    def close(self) -> None:
        """As RangeSource."""
        while self._open:
            os.close(self._open.popitem()[1])
