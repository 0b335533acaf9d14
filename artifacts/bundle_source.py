"""Sources of bundles: a layout on disk, an archive, a registry, the hub. The receiver verifies every byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import BinaryIO, Protocol

from coldstart.artifacts import blobs, canonical, files, oci
from coldstart.artifacts.errors import BundleError, DigestMismatchError, TooLargeError
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


def list_signatures(
    source: BundleSource, entries: Sequence[oci.Descriptor], subject: oci.Descriptor, tries: int = _MAX_LISTED
) -> list[tuple[oci.Descriptor, oci.ImageManifest]]:
    """Return each readable signature manifest about `subject` among the first `tries` signatures of `entries`."""
    signed = [entry for entry in entries if _may_sign(entry)]
    candidates = ((entry, _signature(source, entry)) for entry in signed[:tries])
    good = (
        (entry, image)
        for entry, image in candidates
        if image is not None and image.subject is not None and image.subject.digest == subject.digest
    )
    return list(islice(good, MAX_SIGNATURES))


def group_signatures(layout: OciLayout) -> dict[str, list[oci.Descriptor]]:
    """Return the entries of the readable signatures by the digest of what they sign, each read once."""
    source, found = LayoutSource(layout), dict[str, list[oci.Descriptor]]()
    signed = [entry for entry in layout.entries() if _may_sign(entry)]
    for entry in signed[:_MAX_LISTED]:
        if (image := _signature(source, entry)) is not None and image.subject is not None:
            found.setdefault(image.subject.digest, []).append(entry)
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
        raise TooLargeError(f"blob {blob.digest} is {blob.size} bytes, the cap is {cap}")
    with source.open(blob) as file:
        data = files.read_full(file, blob.size + 1)
    if len(data) != blob.size or canonical.digest(data) != blob.digest:
        raise DigestMismatchError(
            f"blob {blob.digest} of {blob.size} bytes hashes to {canonical.digest(data)}"
        )
    return data


def _may_sign(entry: oci.Descriptor) -> bool:
    return entry.artifact_type in (None, oci.SIGNATURE_TYPE)


def _signature(source: BundleSource, entry: oci.Descriptor) -> oci.ImageManifest | None:
    try:
        image = oci.parse_manifest(small(source, entry, _SIGNATURE_MANIFEST))
    except BundleError:
        return None  # A signature that cannot be read proves nothing.
    is_signature = image.artifact_type == oci.SIGNATURE_TYPE and len(image.layers) == 1
    return image if is_signature else None


def _payload(source: BundleSource, layer: oci.Descriptor) -> bytes | None:
    try:
        return small(source, layer, LIMITS.signature)
    except BundleError:
        return None  # As above.
