"""Sources of bundles: a layout on disk, an archive, a registry, the hub. The receiver verifies every byte."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import BinaryIO, Protocol

from coldstart.artifacts import blobs, oci
from coldstart.artifacts.errors import BundleError, TooLargeError
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
