"""How a client sees the files: slices of one private mapping of the shared region, or the local files themselves."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from coldstart.weights.prefetch.region_layout import RegionLayout

# A private writable mapping promises memory for copies that nobody will make; do not have it reserved.
_FLAGS = mmap.MAP_PRIVATE | 0x4000  # MAP_NORESERVE, which the module names from Python 3.13 on


class LayoutFiles:
    """The files of a layout below `directory`, or in the region behind `descriptor`, which is closed."""

    def __init__(self, layout: RegionLayout, directory: Path, descriptor: int | None) -> None:
        self._layout, self._directory = layout, directory
        self._views: dict[int, memoryview] = {}
        self._region: memoryview | None = None
        if descriptor is not None:
            try:
                self._region = memoryview(mmap.mmap(descriptor, layout.total, flags=_FLAGS))
            finally:
                os.close(descriptor)

    def view(self, number: int) -> memoryview:
        """All bytes of a file. Raises OSError when a local file cannot be mapped or has another size."""
        if number not in self._views:
            file = self._layout.files[number]
            if self._region is not None:
                self._views[number] = self._region[file.base : file.base + file.size]
            elif not file.size:
                self._views[number] = memoryview(b"")
            else:
                self._views[number] = memoryview(_mapped(self._directory / file.name, file.size))
        return self._views[number]

    def close(self) -> None:
        """Let go of the mappings; they end with the last view that somebody else holds."""
        self._views.clear()
        self._region = None


def _mapped(path: Path, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, size, flags=_FLAGS)
    finally:
        os.close(descriptor)
