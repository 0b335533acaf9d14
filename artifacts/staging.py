"""Private directory of a writer in the store. Nothing refers to it before the commit, so a killed writer damages nothing.

A staging directory is in use while its lock is held. The kernel drops the lock when the writer dies, and prune removes
the directory.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from coldstart.artifacts import files, oci
from coldstart.artifacts.errors import TooLargeError, named_os_errors
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.oci_layout import OciLayout

_LOCK = "lock"


class HashingFile:
    """New file that hashes its bytes."""

    def __init__(self, file: BinaryIO, cap: int) -> None:
        self._file, self._cap, self.size = file, cap, 0
        self._hash = sha256()

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data`. Raises TooLargeError above the limit."""
        view = memoryview(data)
        if self.size + len(view) > self._cap:
            raise TooLargeError(f"more than {self._cap} bytes")
        self._file.write(view)
        self._hash.update(view)
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing: writes are not buffered here."""

    def finish(self) -> None:
        """Write the bytes to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    @property
    def digest(self) -> str:
        """Return sha256:<hex> of all written bytes."""
        return "sha256:" + self._hash.hexdigest()


@dataclass(slots=True)
class Staging:
    """Written blobs that are not yet part of the store, by digest."""

    directory: Path
    blobs: dict[str, Path] = field(default_factory=dict)

    def put(self, data: bytes, media_type: str) -> oci.Descriptor:
        """Stage a small blob."""
        with self.file() as file:
            file.write(data)
        return oci.Descriptor(media_type, file.digest, file.size)

    @contextmanager
    def file(self, cap: int = LIMITS.blob) -> Iterator[HashingFile]:
        """Stage a blob by writing to it.

        Its digest is known once the block ends. Raises NoSpaceError, TooLargeError.
        """
        path = self.directory / f"{uuid4().hex}.partial"
        with named_os_errors("writing a blob"), files.create(path, 0o666) as raw:
            file = HashingFile(raw, cap)
            try:
                yield file
                file.finish()
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        self.blobs[file.digest] = path


@contextmanager
def staging(layout: OciLayout) -> Iterator[Staging]:
    """Create a staging directory and remove it at the end of the block. Raises ReadOnlyStoreError or NoSpaceError."""
    layout.create()
    # Under the index lock, so that prune cannot collect the directory before its own lock is held.
    with named_os_errors("preparing to write to the store"), layout.exclusive():
        directory = layout.staging / uuid4().hex
        directory.mkdir(mode=0o700)  # Other users must not read a staged file before it has its own mode.
        handle = files.try_lock(directory / _LOCK)
    try:
        yield Staging(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def abandoned(layout: OciLayout) -> list[Path]:
    """Return the staging directories whose writer is dead. Call under the index lock."""
    return [path for path in sorted(layout.staging.iterdir()) if _is_dead(path)]


def _is_dead(directory: Path) -> bool:
    # A writer creates its lock together with the directory, under the index lock: without a lock it is dead.
    if not (directory / _LOCK).is_file():
        return True
    handle = files.try_lock(directory / _LOCK)
    if handle is None:
        return False
    os.close(handle)
    return True
