"""OCI documents of a bundle (OCI image specification 1.1): layout, index, manifest and descriptors.

A bundle is an image manifest. Its config blob contains key and provenance, and its layers are the sections.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from coldstart.artifacts import canonical
from coldstart.artifacts.errors import InvalidManifestError, NotALayoutError
from coldstart.artifacts.limits import LIMITS

LAYOUT_FILE = "oci-layout"
INDEX_FILE = "index.json"
LAYOUT = canonical.serialize({"imageLayoutVersion": "1.0.0"})
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
BUNDLE_TYPE = "application/vnd.coldstart.bundle.v1"
CONFIG_TYPE = "application/vnd.coldstart.config.v1+json"
SIGNATURE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"

REF_NAME = "org.opencontainers.image.ref.name"
CREATED = "org.opencontainers.image.created"
NAME = "dev.coldstart.name"
KEY = "dev.coldstart.key"
VERSION = "dev.coldstart.version"
SUBJECT = "dev.coldstart.subject"
_SECTION = re.compile(
    r"application/vnd\.coldstart\.section\.(?P<type>[a-z][a-z0-9-]{0,63})\.v(?P<version>[1-9]\d{0,4})[.+a-z]+"
)


Text = Annotated[str, msgspec.Meta(max_length=LIMITS.text_characters)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]
Size = Annotated[int, msgspec.Meta(ge=0, le=LIMITS.blob_bytes)]
Annotations = Annotated[dict[Text, Text], msgspec.Meta(max_length=256)]


class Descriptor(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """OCI descriptor: media type, size in bytes and digest of a blob."""

    media_type: Text
    digest: Digest
    size: Size
    annotations: Annotations = {}
    artifact_type: Text | None = None

    @property
    def listed_version(self) -> int:
        """Return the version recorded in an index entry, or 0 if another tool wrote the entry without one."""
        text = self.annotations.get(VERSION, "")
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0

    @property
    def section_type(self) -> str:
        """Return the type of a section, or the media type of any other blob."""
        matched = _SECTION.fullmatch(self.media_type)
        return matched["type"] if matched else self.media_type

    @property
    def section_version(self) -> int:
        """Return the version of a section's type, or 0 for any other blob."""
        matched = _SECTION.fullmatch(self.media_type)
        return int(matched["version"]) if matched else 0

    def to_document(self) -> dict[str, Any]:
        """Return the descriptor as a JSON object."""
        return dict(msgspec.to_builtins(self))


def describe_blob(data: bytes, media_type: str) -> Descriptor:
    """Return the descriptor of a blob in memory."""
    return Descriptor(media_type, canonical.compute_digest(data), len(data))


class ImageManifest(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """OCI image manifest. In a signature, `subject` is the signed manifest."""

    artifact_type: Text
    config: Descriptor
    layers: Annotated[tuple[Descriptor, ...], msgspec.Meta(max_length=LIMITS.sections)]
    subject: Descriptor | None = None
    annotations: Annotations = {}

    def serialize(self) -> bytes:
        """Return the manifest as canonical JSON."""
        return canonical.serialize(
            msgspec.to_builtins(self) | {"schemaVersion": 2, "mediaType": MANIFEST_TYPE}
        )

    @property
    def blobs(self) -> tuple[Descriptor, ...]:
        """Return the descriptors of the config and the layers, one per digest."""
        return tuple({blob.digest: blob for blob in (self.config, *self.layers)}.values())


class _ManifestHeader(msgspec.Struct, rename="camel"):
    schema_version: int = 0
    media_type: str = ""
    artifact_type: str | None = None


def parse_manifest(data: bytes) -> ImageManifest:
    """Parse an image manifest. Raises TooLargeError, InvalidJsonError or InvalidManifestError."""
    head = canonical.decode(data, _ManifestHeader, max_bytes=LIMITS.manifest_bytes, source="manifest")
    if (head.schema_version, head.media_type) != (2, MANIFEST_TYPE):
        raise InvalidManifestError("the manifest is not an OCI image manifest")
    if head.artifact_type is None:
        raise InvalidManifestError(
            "the manifest describes a container image, not a bundle",
            hint="mount the image at the path of the store, or pull the bundle from the registry",
        )
    return canonical.decode(data, ImageManifest, max_bytes=LIMITS.manifest_bytes, source="manifest")


class _Index(msgspec.Struct):
    manifests: Annotated[list[Descriptor], msgspec.Meta(max_length=100_000)]


def serialize_index(entries: list[Descriptor]) -> bytes:
    """Return an image index as canonical JSON."""
    listed = [entry.to_document() for entry in entries]
    return canonical.serialize({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": listed})


def parse_index(data: bytes) -> list[Descriptor]:
    """Parse an image index and return its entries in file order.

    Raises TooLargeError, InvalidJsonError or InvalidManifestError.
    """
    return canonical.decode(data, _Index, max_bytes=LIMITS.index_bytes, source="index").manifests


class _Layout(msgspec.Struct, rename="camel"):
    image_layout_version: str = ""


def check_layout_version(data: bytes) -> None:
    """Raise NotALayoutError unless `data` is an oci-layout file of version 1."""
    version = canonical.decode(
        data, _Layout, max_bytes=LIMITS.pax_header_bytes, source=LAYOUT_FILE
    ).image_layout_version
    if not version.startswith("1."):
        raise NotALayoutError(f"unsupported image layout version {version[:200]!r}: expected 1.x")
