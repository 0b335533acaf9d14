"""Where bundles come from: a layout on disk, an archive, a registry, the hub. None of them is believed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Protocol

from coldstart.artifacts import blobs, canonical, oci
from coldstart.artifacts.errors import BundleError, DigestMismatch, TooLarge
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.ranges import read_full

if TYPE_CHECKING:
    from coldstart.artifacts.store import Store


class Source(Protocol):
    """What a receiver asks of a source; bytes are verified by the receiver."""

    def open(self, blob: oci.Descriptor, offset: int = 0) -> BinaryIO:
        """The bytes of `blob` from `offset`. Raises MissingBlob or RemoteFailed."""
        ...

    def signatures(self, subject: oci.Descriptor) -> Sequence[bytes]:
        """Signature documents about the manifest `subject`."""
        ...


@dataclass(frozen=True, slots=True)
class LayoutSource:
    """Another store on disk."""

    store: Store

    def open(self, blob: oci.Descriptor, offset: int = 0) -> BinaryIO:
        """The blob's file."""
        file = blobs.open_unverified(self.store.root, blob.digest)
        file.seek(offset)
        return file

    def signatures(self, subject: oci.Descriptor) -> Sequence[bytes]:
        """The payloads listed in the index."""
        return payloads(self, self.store.layout.entries(), subject)


def payloads(source: Source, entries: Sequence[oci.Descriptor], subject: oci.Descriptor) -> list[bytes]:
    """Of `entries`, the payload of each readable signature manifest whose subject is `subject`."""
    signed = [entry for entry in entries if entry.artifact_type == oci.SIGNATURE_TYPE]
    found = [_payload(source, entry, subject) for entry in signed[:256]]
    return [payload for payload in found if payload is not None]


def small(source: Source, blob: oci.Descriptor, cap: int) -> bytes:
    """A whole small blob, verified. Raises TooLarge, DigestMismatch, MissingBlob."""
    if blob.size > cap:
        raise TooLarge(f"blob {blob.digest} is {blob.size} bytes, the cap is {cap}")
    with source.open(blob) as file:
        data = read_full(file, blob.size + 1)
    if len(data) != blob.size or canonical.digest(data) != blob.digest:
        raise DigestMismatch(f"blob {blob.digest} of {blob.size} bytes hashes to {canonical.digest(data)}")
    return data


def _payload(source: Source, entry: oci.Descriptor, subject: oci.Descriptor) -> bytes | None:
    try:
        image = oci.parse_manifest(small(source, entry, LIMITS.manifest))
        if image.subject is None or image.subject.digest != subject.digest or len(image.layers) != 1:
            return None
        return small(source, image.layers[0], LIMITS.signature)
    except BundleError:
        return None  # A signature that cannot be read vouches for nothing.
