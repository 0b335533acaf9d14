"""OCI documents of a bundle (OCI image specification 1.1): layout, index, manifest, descriptors.

A bundle is one image manifest: its config blob contains key, provenance and section table, its layers are the sections.
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
LAYOUT = canonical.dumps({"imageLayoutVersion": "1.0.0"})
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


Text = Annotated[str, msgspec.Meta(max_length=LIMITS.text)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]
Size = Annotated[int, msgspec.Meta(ge=0, le=LIMITS.blob)]
Annotations = Annotated[dict[Text, Text], msgspec.Meta(max_length=256)]


class Descriptor(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """Pointer to a blob: type, size and digest."""

    media_type: Text
    digest: Digest
    size: Size
    annotations: Annotations = {}
    artifact_type: Text | None = None

    @property
    def listed_version(self) -> int:
        """Return the version that an entry of an index names; 0 if another tool wrote the entry without one."""
        text = self.annotations.get(VERSION, "")
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0

    @property
    def type(self) -> str:
        """Return the type of a section, or the media type of what is no section."""
        matched = _SECTION.fullmatch(self.media_type)
        return matched["type"] if matched else self.media_type

    @property
    def version(self) -> int:
        """Return the version of a section's type, 0 for what is no section."""
        matched = _SECTION.fullmatch(self.media_type)
        return int(matched["version"]) if matched else 0

    def document(self) -> dict[str, Any]:
        """Return the JSON object of this descriptor."""
        return dict(msgspec.to_builtins(self))

    def bare(self) -> Descriptor:
        """Return the same descriptor without annotations."""
        return msgspec.structs.replace(self, annotations={})


def describe(data: bytes, media_type: str) -> Descriptor:
    """Return the descriptor of a blob in memory."""
    return Descriptor(media_type, canonical.digest(data), len(data))


class ImageManifest(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """OCI image manifest; `subject` is set for signatures."""

    artifact_type: Text
    config: Descriptor
    layers: Annotated[tuple[Descriptor, ...], msgspec.Meta(max_length=LIMITS.sections)]
    subject: Descriptor | None = None
    annotations: Annotations = {}

    def document(self) -> bytes:
        """Return this manifest as canonical JSON."""
        return canonical.dumps(msgspec.to_builtins(self) | {"schemaVersion": 2, "mediaType": MANIFEST_TYPE})

    @property
    def blobs(self) -> tuple[Descriptor, ...]:
        """Return config and layers, each digest once."""
        return tuple({blob.digest: blob for blob in (self.config, *self.layers)}.values())


class _Head(msgspec.Struct, rename="camel"):
    schema_version: int = 0
    media_type: str = ""
    artifact_type: str | None = None


def parse_manifest(data: bytes) -> ImageManifest:
    """Parse a manifest. Raises TooLargeError, InvalidJsonError or InvalidManifestError."""
    head = canonical.decode(data, _Head, cap=LIMITS.manifest, what="manifest")
    if (head.schema_version, head.media_type) != (2, MANIFEST_TYPE):
        raise InvalidManifestError("manifest is not an OCI image manifest")
    if head.artifact_type is None:
        raise InvalidManifestError(
            "this is the manifest of a container image, not of a bundle",
            hint="mount the image at the path of the store, or pull the bundle from the registry",
        )
    return canonical.decode(data, ImageManifest, cap=LIMITS.manifest, what="manifest")


class _Index(msgspec.Struct):
    manifests: Annotated[list[Descriptor], msgspec.Meta(max_length=100_000)]


def index_document(entries: list[Descriptor]) -> bytes:
    """Return the canonical bytes of an image index."""
    listed = [entry.document() for entry in entries]
    return canonical.dumps({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": listed})


def parse_index(data: bytes) -> list[Descriptor]:
    """Return the entries in file order. Raises TooLargeError, InvalidJsonError or InvalidManifestError."""
    return canonical.decode(data, _Index, cap=LIMITS.index, what="index").manifests


class _Layout(msgspec.Struct, rename="camel"):
    image_layout_version: str = ""


def check_layout(data: bytes) -> None:
    """Raise NotALayoutError unless `data` is an oci-layout file of version 1."""
    version = canonical.decode(data, _Layout, cap=LIMITS.pax_header, what=LAYOUT_FILE).image_layout_version
    if not version.startswith("1."):
        raise NotALayoutError(f"image layout version {version[:200]!r} is not 1.x")
