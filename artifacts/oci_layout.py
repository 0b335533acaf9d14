"""Sources from which bundles are copied, and the OCI image layout on disk (oci-layout, index.json, blobs/sha256).

A layout is one type of source; the other sources are archives, registries and the hub. The receiver verifies every byte.
Readers take no lock and write nothing. Writers publish blobs, then manifests, then the index, so each index entry is
complete and durable.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Protocol

from coldstart.artifacts import blobs, files, oci
from coldstart.artifacts.errors import BundleError, NotALayoutError, TooLargeError, translate_os_errors
from coldstart.artifacts.limits import LIMITS

# Each signature that is read costs a request. The index of a store may list many signatures of other bundles.
MAX_SIGNATURES, _MAX_LISTED = 64, 8192
_SIGNATURE_MANIFEST = 64 << 10


class BundleSource(Protocol):
    """Source from which bundles are copied. The receiver verifies the bytes."""

    def open(self, blob: oci.Descriptor) -> BinaryIO:
        """Open the bytes of `blob`. Raises MissingBlobError or RemoteFailedError."""
        ...

    def read_signatures(self, subject: oci.Descriptor) -> Sequence[bytes]:
        """Return the signature documents of the manifest `subject`."""
        ...


def is_bundle(source: BundleSource, entry: oci.Descriptor) -> bool:
    """Return whether an index entry is a bundle.

    Read the manifest if the entry has no artifact type, which some clients omit.
    """
    if entry.artifact_type is not None or entry.media_type != oci.MANIFEST_TYPE:
        return entry.artifact_type == oci.BUNDLE_TYPE
    try:
        manifest = oci.parse_manifest(read_small_blob(source, entry, LIMITS.manifest_bytes))
        return manifest.artifact_type == oci.BUNDLE_TYPE
    except BundleError:
        return False  # An unreadable manifest may belong to another artifact.


def list_signatures(
    source: BundleSource,
    entries: Sequence[oci.Descriptor],
    subject: oci.Descriptor,
    max_reads: int = _MAX_LISTED,
) -> list[tuple[oci.Descriptor, oci.ImageManifest]]:
    """Return the entries in `entries` that are signatures of `subject`, each with its parsed manifest.

    Unreadable signatures are skipped. At most `max_reads` manifests are read: entries that another tool wrote have no
    annotation with their subject, so their manifests must be read.
    """
    found = list[tuple[oci.Descriptor, oci.ImageManifest]]()
    signatures = (one for one in entries if one.artifact_type in (None, oci.SIGNATURE_TYPE))
    about = (one for one in signatures if one.annotations.get(oci.SUBJECT, subject.digest) == subject.digest)
    for entry in islice(about, max_reads):
        try:
            image = oci.parse_manifest(read_small_blob(source, entry, _SIGNATURE_MANIFEST))
        except BundleError:
            continue  # An unreadable signature does not make a bundle trusted.
        signed = image.subject.digest if image.subject else None
        if (image.artifact_type, len(image.layers), signed) == (oci.SIGNATURE_TYPE, 1, subject.digest):
            found.append((entry, image))
    return found[:MAX_SIGNATURES]


def read_signature_documents(
    source: BundleSource,
    entries: Sequence[oci.Descriptor],
    subject: oci.Descriptor,
    max_reads: int = _MAX_LISTED,
) -> list[bytes]:
    """Return the documents of the signatures of `subject` that `list_signatures` finds. Unreadable documents are skipped."""
    documents = list[bytes]()
    for _, image in list_signatures(source, entries, subject, max_reads):
        with suppress(BundleError):  # as in `list_signatures`
            documents.append(read_small_blob(source, image.layers[0], LIMITS.signature_bytes))
    return documents


def read_small_blob(source: BundleSource, blob: oci.Descriptor, max_bytes: int) -> bytes:
    """Read and verify a blob of at most `max_bytes`. Raises TooLargeError, DigestMismatchError, MissingBlobError."""
    if blob.size > max_bytes:
        raise TooLargeError(f"blob {blob.digest} has {blob.size} bytes; the limit is {max_bytes} bytes")
    with blobs.VerifiedReader(source.open(blob), blob.digest, blob.size) as reader:
        return reader.readall() or b""


@dataclass(frozen=True, slots=True)
class OciLayout:
    """OCI image layout in the directory `root`. Locks and staged blobs are in `root/.coldstart`, which OCI clients ignore."""

    root: Path

    @property
    def blobs_dir(self) -> Path:
        """Return the directory of blobs."""
        return self.root / "blobs" / "sha256"

    @property
    def private_dir(self) -> Path:
        """Return the directory of locks and staged blobs."""
        return self.root / ".coldstart"

    @property
    def staging_dir(self) -> Path:
        """Return the directory in which writers stage blobs."""
        return self.private_dir / "staging"

    @property
    def index_path(self) -> Path:
        """Return the path of index.json."""
        return self.root / oci.INDEX_FILE

    @property
    def exists(self) -> bool:
        """Return whether `root` contains an image layout."""
        return (self.root / oci.LAYOUT_FILE).exists()

    def create(self) -> None:
        """Create an empty layout unless one exists. Raises ReadOnlyStoreError, NoSpaceError or NotALayoutError."""
        with translate_os_errors("creating the store"):
            for directory in (self.blobs_dir, self.staging_dir, self.private_dir / "locks"):
                directory.mkdir(parents=True, exist_ok=True)
        with self.lock_index():
            if not self.index_path.exists():
                files.write_atomic(self.index_path, oci.serialize_index([]))
            if not self.exists:
                files.write_atomic(self.root / oci.LAYOUT_FILE, oci.LAYOUT)

    def read_entries(self) -> list[oci.Descriptor]:
        """Read the entries of index.json, or return no entries if the store does not exist.

        Raises NotALayoutError for a directory with other content, and InvalidJsonError or InvalidManifestError for an
        invalid index.
        """
        if not self.exists:
            return []
        # Commands that build or fetch a bundle read the index too, and fail until the directory is replaced.
        hint = f"`mv {shlex.quote(str(self.root))} ELSEWHERE`, then materialize or pull its bundles again"
        try:
            oci.check_layout_version(files.read_regular(self.root / oci.LAYOUT_FILE, LIMITS.pax_header_bytes))
            return oci.parse_index(files.read_regular(self.index_path, LIMITS.index_bytes))
        except FileNotFoundError as error:
            raise NotALayoutError(f"the store {self.root} has no {oci.INDEX_FILE}", hint=hint) from error
        except BundleError as error:
            raise type(error)(f"cannot read the store {self.root}: {error.message}", hint=hint) from error

    def open(self, blob: oci.Descriptor) -> BinaryIO:
        """Open the file of a blob without verifying it. Raises the errors of blobs.open_unverified."""
        return blobs.open_unverified(self.root, blob.digest)

    def read_signatures(self, subject: oci.Descriptor) -> Sequence[bytes]:
        """Return the documents of all signatures that the index lists for the manifest `subject`."""
        return read_signature_documents(self, self.read_entries(), subject)

    @property
    def index_lock(self) -> Path:
        """Return the path of the index lock. Only its holder may change index.json or rename files in the blob directory."""
        return self.private_dir / "index.lock"

    def lock_index(self) -> AbstractContextManager[None]:
        """Hold the index lock."""
        return files.hold_lock(self.index_lock)

    def publish_blobs(self, staged: Iterable[tuple[str, Path]]) -> None:
        """Rename staged files, which are already on disk, to their blob names. `staged` has pairs of digest and path.

        The caller holds the index lock. Existing blobs are replaced: the new bytes match the digest, and the old ones may
        be damaged.
        """
        with translate_os_errors("publishing blobs"):
            for digest, path in staged:
                path.rename(blobs.blob_path(self.root, digest))
            files.sync_directory(self.blobs_dir)

    def write_index(self, entries: list[oci.Descriptor]) -> None:
        """Replace the entries of index.json. The caller holds the index lock."""
        files.write_atomic(self.index_path, oci.serialize_index(entries))
