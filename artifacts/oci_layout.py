"""OCI image layout on disk: oci-layout, index.json, blobs/sha256. Readers take no lock and write nothing.

The commit order is blobs, manifest, index. So each entry of index.json is complete and durable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from coldstart.artifacts import files, oci
from coldstart.artifacts.blobs import blob_path, open_unverified
from coldstart.artifacts.bundle_source import payloads
from coldstart.artifacts.errors import NotALayoutError, named_os_errors
from coldstart.artifacts.limits import LIMITS


@dataclass(frozen=True, slots=True)
class OciLayout:
    """Layout at `root`; locks and staging are in `root/.coldstart`, which OCI clients ignore."""

    root: Path

    @property
    def blobs(self) -> Path:
        """Return the directory of blobs."""
        return self.root / "blobs" / "sha256"

    @property
    def private(self) -> Path:
        """Return the directory of locks and staging."""
        return self.root / ".coldstart"

    @property
    def staging(self) -> Path:
        """Return the directory where writers prepare blobs."""
        return self.private / "staging"

    @property
    def index(self) -> Path:
        """Return the path of index.json."""
        return self.root / oci.INDEX_FILE

    @property
    def exists(self) -> bool:
        """Return whether a bundle was ever published here."""
        return (self.root / oci.LAYOUT_FILE).exists()

    def create(self) -> None:
        """Create an empty layout unless one exists. Raises ReadOnlyStoreError, NoSpaceError or NotALayoutError."""
        with named_os_errors("creating the store"):
            for directory in (self.blobs, self.staging, self.private / "locks"):
                directory.mkdir(parents=True, exist_ok=True)
        with self.exclusive():
            if not self.index.exists():
                files.write_atomic(self.index, oci.index_document([]))
            if not self.exists:
                files.write_atomic(self.root / oci.LAYOUT_FILE, oci.LAYOUT)

    def entries(self) -> list[oci.Descriptor]:
        """Return the entries of index.json; none for a store that does not exist yet.

        Raises NotALayoutError for a directory with other content, InvalidJsonError or InvalidManifestError for an invalid
        index.
        """
        if not self.exists:
            return []
        return oci.parse_index(self._index())

    def open(self, blob: oci.Descriptor) -> BinaryIO:
        """Open a blob's file, as specified by BundleSource."""
        return open_unverified(self.root, blob.digest)

    def signatures(self, subject: oci.Descriptor) -> Sequence[bytes]:
        """Return the signature documents that the index lists, as specified by BundleSource."""
        return payloads(self, self.entries(), subject)

    def _index(self) -> bytes:
        try:
            oci.check_layout(files.read_regular(self.root / oci.LAYOUT_FILE, LIMITS.pax_header))
            return files.read_regular(self.index, LIMITS.index)
        except FileNotFoundError as error:
            raise NotALayoutError(f"{self.root.name} has no {oci.INDEX_FILE}") from error

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the index lock, so that this is the only writer of index.json and of names in blobs."""
        with files.locked(self.private / "index.lock"):
            yield

    def key_lock(self, digest: str) -> Path:
        """Return the lock file of a key, which lets one process build a bundle while others wait."""
        return self.private / "locks" / f"{blob_path(self.root, digest).name}.lock"

    def place(self, staged: Iterable[tuple[str, Path]]) -> None:
        """Rename synced files to their blob names. Call under the index lock.

        An existing blob is replaced: the new bytes match the digest, the old ones may be damaged.
        """
        with named_os_errors("publishing blobs"):
            for digest, path in staged:
                path.rename(blob_path(self.root, digest))
            files.sync_directory(self.blobs)

    def write_index(self, entries: list[oci.Descriptor]) -> None:
        """Replace the entries of index.json. Call under the index lock."""
        files.write_atomic(self.index, oci.index_document(entries))
