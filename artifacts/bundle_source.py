"""Sources of bundles: a layout on disk, an archive, a registry, the hub. The receiver verifies every byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import BinaryIO, Protocol

from coldstart.artifacts import blobs, oci
from coldstart.artifacts.errors import BundleError, TooLargeError
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.oci_layout import OciLayout

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


@dataclass(frozen=True, slots=True)
class LayoutSource:
    """Layout on disk as a source."""

    layout: OciLayout

    def open(self, blob: oci.Descriptor) -> BinaryIO:
        """Open the blob's file."""
        return blobs.open_unverified(self.layout.root, blob.digest)

    def signatures(self, subject: oci.Descriptor) -> Sequence[bytes]:
        """Return the payloads that the index lists."""
        return payloads(self, self.layout.entries(), subject)


def is_bundle(source: BundleSource, entry: oci.Descriptor) -> bool:
    """Return whether an index entry is a bundle. Some clients copy a manifest and leave its artifact type out of the index."""
    if entry.artifact_type is not None or entry.media_type != oci.MANIFEST_TYPE:
        return entry.artifact_type == oci.BUNDLE_TYPE
    try:
        return oci.parse_manifest(small(source, entry, LIMITS.manifest)).artifact_type == oci.BUNDLE_TYPE
    except BundleError:
        return False  # A manifest that cannot be read is not known to be a bundle.


def read_signatures(
    source: BundleSource, entries: Sequence[oci.Descriptor], tries: int = _MAX_LISTED
) -> Iterator[tuple[oci.Descriptor, oci.ImageManifest, str]]:
    """Yield the readable signature manifests among the first `tries` of `entries`, each with the digest of what it signs."""
    for entry in [one for one in entries if one.artifact_type in (None, oci.SIGNATURE_TYPE)][:tries]:
        try:
            image = oci.parse_manifest(small(source, entry, _SIGNATURE_MANIFEST))
        except BundleError:
            continue  # A signature that cannot be read proves nothing.
        if image.artifact_type == oci.SIGNATURE_TYPE and len(image.layers) == 1 and image.subject is not None:
            yield entry, image, image.subject.digest


def list_signatures(
    source: BundleSource, entries: Sequence[oci.Descriptor], subject: oci.Descriptor, tries: int = _MAX_LISTED
) -> list[tuple[oci.Descriptor, oci.ImageManifest]]:
    """Return each readable signature manifest about `subject` among the first `tries` signatures of `entries`."""
    found = read_signatures(source, entries, tries)
    about = ((entry, image) for entry, image, signed in found if signed == subject.digest)
    return list(islice(about, MAX_SIGNATURES))


def group_signatures(layout: OciLayout) -> dict[str, list[oci.Descriptor]]:
    """Return the entries of the readable signatures by the digest of what they sign, each read once."""
    found = dict[str, list[oci.Descriptor]]()
    for entry, _, signed in read_signatures(LayoutSource(layout), layout.entries()):
        found.setdefault(signed, []).append(entry)
    return found


def payloads(
    source: BundleSource, entries: Sequence[oci.Descriptor], subject: oci.Descriptor, tries: int = _MAX_LISTED
) -> list[bytes]:
    """Return the documents of `list_signatures` that can be read."""
    documents = (
        _payload(source, image.layers[0]) for _, image in list_signatures(source, entries, subject, tries)
    )
    return [payload for payload in documents if payload is not None]


def small(source: BundleSource, blob: oci.Descriptor, cap: int) -> bytes:
    """Read and verify a small blob. Raises TooLargeError, DigestMismatchError, MissingBlobError."""
    if blob.size > cap:
        raise TooLargeError(f"blob {blob.digest} is {blob.size} bytes, over the limit of {cap}")
    with blobs.VerifiedReader(source.open(blob), blob.digest, blob.size) as reader:
        return reader.readall() or b""


def _payload(source: BundleSource, layer: oci.Descriptor) -> bytes | None:
    try:
        return small(source, layer, LIMITS.signature)
    except BundleError:
        return None  # It proves nothing either.
