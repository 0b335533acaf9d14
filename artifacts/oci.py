"""OCI documents of a bundle (OCI image specification 1.1): layout, index, manifest, descriptors.

A bundle is one image manifest: its config blob contains key, provenance and section table, its layers are the sections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from coldstart.artifacts import canonical, fields
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


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Pointer to a blob: type, size and digest."""

    media_type: str
    digest: str
    size: int
    annotations: Mapping[str, str] = field(default_factory=dict)
    artifact_type: str | None = None

    @property
    def version(self) -> int:
        """Return the version that an entry of an index names; 0 if another tool wrote the entry without one."""
        text = self.annotations.get(VERSION, "")
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0

    def document(self) -> dict[str, object]:
        """Return the JSON object of this descriptor."""
        document: dict[str, object] = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        if self.artifact_type:
            document["artifactType"] = self.artifact_type
        if self.annotations:
            document["annotations"] = dict(self.annotations)
        return document

    def bare(self) -> Descriptor:
        """Return the same descriptor without annotations."""
        return replace(self, annotations={})


def describe(data: bytes, media_type: str) -> Descriptor:
    """Return the descriptor of a blob in memory."""
    return Descriptor(media_type, canonical.digest(data), len(data))


def parse_descriptor(value: object, where: str) -> Descriptor:
    """Parse a descriptor. Raises InvalidManifestError or TooLargeError."""
    members = fields.mapping(value, where)
    kind = members.get("artifactType")
    return Descriptor(
        media_type=fields.text(members.get("mediaType"), f"{where}.mediaType"),
        digest=fields.digest(members.get("digest"), f"{where}.digest"),
        size=fields.count(members.get("size"), f"{where}.size", cap=LIMITS.blob),
        annotations=fields.texts(members.get("annotations"), f"{where}.annotations"),
        artifact_type=None if kind is None else fields.text(kind, f"{where}.artifactType"),
    )


@dataclass(frozen=True, slots=True)
class ImageManifest:
    """OCI image manifest; `subject` is set for signatures."""

    artifact_type: str
    config: Descriptor
    layers: tuple[Descriptor, ...]
    subject: Descriptor | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> bytes:
        """Return the canonical bytes."""
        document: dict[str, object] = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": self.artifact_type,
            "config": self.config.document(),
            "layers": [layer.document() for layer in self.layers],
        }
        if self.subject:
            document["subject"] = self.subject.document()
        if self.annotations:
            document["annotations"] = dict(self.annotations)
        return canonical.dumps(document)

    @property
    def blobs(self) -> tuple[Descriptor, ...]:
        """Return config and layers, each digest once."""
        return tuple({blob.digest: blob for blob in (self.config, *self.layers)}.values())


def parse_manifest(data: bytes) -> ImageManifest:
    """Parse a manifest. Raises TooLargeError, InvalidJsonError, DuplicateKeyError or InvalidManifestError."""
    members = fields.mapping(canonical.loads(data, cap=LIMITS.manifest, what="manifest"), "manifest")
    if members.get("schemaVersion") != 2 or members.get("mediaType") != MANIFEST_TYPE:
        raise InvalidManifestError("manifest is not an OCI image manifest")
    if "artifactType" not in members:
        raise InvalidManifestError(
            "the manifest is of a container image, not of a bundle",
            hint="mount the image at the path of the store, or pull the bundle from the registry",
        )
    layers = fields.items(members.get("layers"), "manifest.layers", cap=LIMITS.sections)
    subject = members.get("subject")
    return ImageManifest(
        artifact_type=fields.text(members.get("artifactType"), "manifest.artifactType"),
        config=parse_descriptor(members.get("config"), "manifest.config"),
        layers=tuple(parse_descriptor(item, f"manifest.layers[{n}]") for n, item in enumerate(layers)),
        subject=None if subject is None else parse_descriptor(subject, "manifest.subject"),
        annotations=fields.texts(members.get("annotations"), "manifest.annotations"),
    )


def index_document(entries: list[Descriptor]) -> bytes:
    """Return the canonical bytes of an image index."""
    listed = [entry.document() for entry in entries]
    return canonical.dumps({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": listed})


def parse_index(data: bytes) -> list[Descriptor]:
    """Return the entries in file order. Raises TooLargeError, InvalidJsonError or InvalidManifestError."""
    members = fields.mapping(canonical.loads(data, cap=LIMITS.index, what="index"), "index")
    listed = fields.items(members.get("manifests"), "index.manifests", cap=100_000)
    return [parse_descriptor(item, f"index.manifests[{n}]") for n, item in enumerate(listed)]


def check_layout(data: bytes) -> None:
    """Raise NotALayoutError unless `data` is an oci-layout file of version 1."""
    members = canonical.loads(data, cap=LIMITS.pax_header, what=LAYOUT_FILE)
    version = members.get("imageLayoutVersion") if isinstance(members, dict) else None
    if not isinstance(version, str) or not version.startswith("1."):
        raise NotALayoutError(f"image layout version {version!r} is not 1.x")
