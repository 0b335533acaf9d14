"""Open the source of a weights address: local directory, HTTP server, S3-compatible store or Hugging Face Hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from coldstart.artifacts import files
from coldstart.weights.prefetch.range_source import Count, RangeSource, SourceUnusableError


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
