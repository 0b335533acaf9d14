"""Sources of bundles, and the OCI image layout on disk (oci-layout, index.json, blobs/sha256), which is one of them.

Other sources are an archive, a registry and the hub; the receiver verifies every byte. Readers take no lock and write nothing.

The commit order is blobs, manifest, index. So each entry of index.json is complete and durable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Protocol

from coldstart.artifacts import blobs, files, oci
from coldstart.artifacts.errors import BundleError, NotALayoutError, TooLargeError, named_os_errors
from coldstart.artifacts.limits import LIMITS

# Limit of the signatures that are read: each one costs a request. A store's index may list many of other bundles.
MAX_SIGNATURES, _MAX_LISTED = 64, 8192
_SIGNATURE_MANIFEST = 64 << 10


class BundleSource(Protocol):
    """Source that bundles are copied from; the receiver verifies the bytes."""

    def open(self, blob: oci.Descriptor) -> BinaryIO:
        """Open the bytes of `blob`. Raises MissingBlobError or RemoteFailedError."""
        ...

    def signatures(self, subject: oci.Descriptor) -> Sequence[bytes]:
        """Return signature documents about the manifest `subject`."""
        ...


def is_bundle(source: BundleSource, entry: oci.Descriptor) -> bool:
    """Return whether an index entry is a bundle. Some clients copy a manifest and leave its artifact type out of the index."""
    if entry.artifact_type is not None or entry.media_type != oci.MANIFEST_TYPE:
        return entry.artifact_type == oci.BUNDLE_TYPE
    try:
        return oci.parse_manifest(small(source, entry, LIMITS.manifest)).artifact_type == oci.BUNDLE_TYPE
    except BundleError:
        return False  # A manifest that cannot be read is not known to be a bundle.


def list_signatures(
    source: BundleSource, entries: Sequence[oci.Descriptor], subject: oci.Descriptor, tries: int = _MAX_LISTED
) -> list[tuple[oci.Descriptor, oci.ImageManifest]]:
    """Return the readable signature manifests about `subject` among `entries`, of which up to `tries` are read.

    An entry that another tool wrote does not name its subject.
    """
    found = list[tuple[oci.Descriptor, oci.ImageManifest]]()
    signatures = (one for one in entries if one.artifact_type in (None, oci.SIGNATURE_TYPE))
    about = (one for one in signatures if one.annotations.get(oci.SUBJECT, subject.digest) == subject.digest)
    for entry in islice(about, tries):
        try:
            image = oci.parse_manifest(small(source, entry, _SIGNATURE_MANIFEST))
        except BundleError:
            continue  # A signature that cannot be read proves nothing.
        signed = image.subject.digest if image.subject else None
        if (image.artifact_type, len(image.layers), signed) == (oci.SIGNATURE_TYPE, 1, subject.digest):
            found.append((entry, image))
    return found[:MAX_SIGNATURES]


def payloads(
    source: BundleSource, entries: Sequence[oci.Descriptor], subject: oci.Descriptor, tries: int = _MAX_LISTED
) -> list[bytes]:
    """Return the documents of `list_signatures` that can be read."""
    documents = list[bytes]()
    for _, image in list_signatures(source, entries, subject, tries):
        with suppress(BundleError):  # It proves nothing either.
            documents.append(small(source, image.layers[0], LIMITS.signature))
    return documents


def small(source: BundleSource, blob: oci.Descriptor, cap: int) -> bytes:
    """Read and verify a small blob. Raises TooLargeError, DigestMismatchError, MissingBlobError."""
    if blob.size > cap:
        raise TooLargeError(f"blob {blob.digest} is {blob.size} bytes, over the limit of {cap}")
    with blobs.VerifiedReader(source.open(blob), blob.digest, blob.size) as reader:
        return reader.readall() or b""


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
        try:
            oci.check_layout(files.read_regular(self.root / oci.LAYOUT_FILE, LIMITS.pax_header))
            return oci.parse_index(files.read_regular(self.index, LIMITS.index))
        except FileNotFoundError as error:
            raise NotALayoutError(f"{self.root.name} has no {oci.INDEX_FILE}") from error

    def open(self, blob: oci.Descriptor) -> BinaryIO:
        """Open a blob's file, as specified by BundleSource."""
        return blobs.open_unverified(self.root, blob.digest)

    def signatures(self, subject: oci.Descriptor) -> Sequence[bytes]:
        """Return the signature documents that the index lists, as specified by BundleSource."""
        return payloads(self, self.entries(), subject)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the index lock, so that this is the only writer of index.json and of names in blobs."""
        with files.locked(self.private / "index.lock"):
            yield

    def place(self, staged: Iterable[tuple[str, Path]]) -> None:
        """Rename synced files to their blob names. Call under the index lock.

        An existing blob is replaced: the new bytes match the digest, the old ones may be damaged.
        """
        with named_os_errors("publishing blobs"):
            for digest, path in staged:
                path.rename(blobs.blob_path(self.root, digest))
            files.sync_directory(self.blobs)

    def write_index(self, entries: list[oci.Descriptor]) -> None:
        """Replace the entries of index.json. Call under the index lock."""
        files.write_atomic(self.index, oci.index_document(entries))
