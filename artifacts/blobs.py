"""Content-addressed blobs: the file blobs/sha256/<hex> contains the bytes whose SHA-256 digest is <hex>.

Bytes are hashed before they are trusted. A blob file that is a symbolic link is rejected.
"""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import BinaryIO

from coldstart.artifacts import canonical, files
from coldstart.artifacts.errors import (
    BundleError,
    DigestMismatchError,
    MissingBlobError,
    UnreadableError,
    UnsafeLinkError,
)


def blob_path(root: Path, digest: str) -> Path:
    """Return the path of a blob below `root`. Raises InvalidManifestError unless `digest` is sha256:<hex>."""
    return root / "blobs" / "sha256" / canonical.check_digest(digest).removeprefix("sha256:")


def open_unverified(root: Path, digest: str) -> BinaryIO:
    """Open a blob's file without verifying its digest. Raises MissingBlobError, UnsafeLinkError, UnreadableError."""
    try:
        handle = files.open_descriptor(blob_path(root, digest), follow=False)
    except FileNotFoundError as error:
        raise MissingBlobError(f"blob {digest} is not in the store") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnsafeLinkError(f"blob {digest} is a symbolic link") from error
        raise UnreadableError(f"blob {digest} cannot be opened: {error.strerror}") from error
    return os.fdopen(handle, "rb", buffering=0)


class VerifiedReader(io.RawIOBase):
    """Stream that hashes a blob while it is read, and raises DigestMismatchError at the end if digest or size are wrong."""

    def __init__(self, source: BinaryIO, digest: str, size: int) -> None:
        self._source, self._digest, self._size = source, digest, size
        from hashlib import sha256  # Imported late, as in `canonical.compute_digest`.

        self._hash, self._seen, self._checked = sha256(), 0, False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read into `buffer` and return the number of bytes read. At the end, verify the digest and return 0."""
        try:
            data = self._source.read(len(buffer))
        except OSError as error:
            raise UnreadableError(f"blob {self._digest} cannot be read: {error.strerror}") from error
        self._hash.update(data)
        self._seen += len(data)
        if self._seen > self._size:
            raise DigestMismatchError(f"blob {self._digest} is longer than the recorded {self._size} bytes")
        if not data and len(buffer):
            self._check()
        buffer[: len(data)] = data
        return len(data)

    def drain(self) -> None:
        """Read to the end, so that the digest is verified even if the consumer stopped early."""
        while not self._checked:
            self.read(1 << 20)

    def close(self) -> None:
        """Close the stream and its source."""
        self._source.close()
        super().close()

    def _check(self) -> None:
        digest = "sha256:" + self._hash.hexdigest()
        if digest != self._digest or self._seen != self._size:
            raise DigestMismatchError(
                f"blob {self._digest} ({self._size} bytes) is damaged: it contains {self._seen} bytes with digest {digest}"
            )
        self._checked = True


def open_verified(root: Path, digest: str, size: int) -> VerifiedReader:
    """Open a blob as a stream that is verified at its end. Raises MissingBlobError, UnsafeLinkError, UnreadableError."""
    return VerifiedReader(open_unverified(root, digest), digest, size)


def find_blob_error(root: Path, digest: str, size: int) -> BundleError | None:
    """Verify a blob, and return the error found, or None if the blob is intact.

    The error is a MissingBlobError, DigestMismatchError, UnsafeLinkError or UnreadableError.
    """
    try:
        with open_verified(root, digest, size) as reader:
            reader.drain()
    except (MissingBlobError, DigestMismatchError, UnsafeLinkError, UnreadableError) as error:
        return error
    return None
