"""Files as a client sees them: slices of a private mapping of the shared region, or mapped local files."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from coldstart.artifacts import files
from coldstart.weights.prefetch.region_layout import RegionLayout

# A private writable mapping reserves memory for copies, and no client makes any.
_FLAGS = mmap.MAP_PRIVATE | 0x4000  # MAP_NORESERVE; mmap defines it from Python 3.13


class LayoutFiles:
    """Files of a layout in `directory`, or in the memory of `descriptor`, which the constructor closes."""

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
        """Return all bytes of a file.

        Raises:
            OSError: A local file cannot be opened or mapped.
            ValueError: A local file is shorter than in the plan.
        """
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
        """Release the mappings; each of them ends with its last view."""
        self._views.clear()
        self._region = None


def _mapped(path: Path, size: int) -> mmap.mmap:
    descriptor = files.open_descriptor(path)
    try:
        return mmap.mmap(descriptor, size, flags=_FLAGS)
    finally:
        os.close(descriptor)
