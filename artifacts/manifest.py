"""Manifest of a bundle: key and provenance from the config blob, and sections, which are the layers of the image manifest.

A section's type determines its encoding and whether it contains code. A bundle cannot change that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from coldstart.artifacts import canonical, oci
from coldstart.artifacts.errors import FormatTooNewError, InvalidManifestError, SectionTableError
from coldstart.artifacts.key import Key
from coldstart.artifacts.limits import LIMITS

# MAJOR.MINOR: a newer minor version may only add fields and section types, which older readers ignore.
FORMAT_VERSION = "1.0"
_VERSION = re.compile(r"(0|[1-9]\d{0,3})\.(0|[1-9]\d{0,3})")
# A UTC time such as 2026-01-02T03:04:05Z, and a name such as org/model.
_CREATED = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ\Z"
_NAME = r"^(?=.{1,128}\Z)[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*\Z"


Encoding = Literal["json", "tar.zst"]
_SUFFIX: Mapping[Encoding, str] = {"json": "+json", "tar.zst": ".tar+zstd"}


@dataclass(frozen=True, slots=True)
class SectionType:
    """Type of a bundle section. `version` is the version that this coldstart version writes, and the newest that it reads."""

    name: str
    version: int
    executable: bool
    encoding: Encoding

    @property
    def media_type(self) -> str:
        """Return the OCI media type of the layer, such as application/vnd.coldstart.section.kv.v1+json."""
        return f"application/vnd.coldstart.section.{self.name}.v{self.version}{_SUFFIX[self.encoding]}"


# Other types (of a newer minor version) are retained and reported, but never opened or executed.
SECTION_TYPES: Mapping[str, SectionType] = MappingProxyType(
    {
        one: SectionType(one, 1, False, "json")
        for one in ("kv", "modelinfo", "weights", "iterations", "stages")
    }
    | {one: SectionType(one, 1, True, "tar.zst") for one in ("compile", "graphs")}
)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Origin of a bundle: `created` is a UTC time, and `seconds` maps each build stage to its duration.

    No field contains a path or host name.
    """

    created: Annotated[str, msgspec.Meta(pattern=_CREATED)]
    tool: oci.Annotations
    arguments: Annotated[tuple[oci.Text, ...], msgspec.Meta(max_length=1024)]
    seconds: dict[str, float]
    model_name: Annotated[str, msgspec.Meta(pattern=_NAME)]

    def to_document(self) -> dict[str, Any]:
        """Return the provenance as a JSON object."""
        return dict(msgspec.to_builtins(self))


@dataclass(frozen=True, slots=True)
class Manifest:
    """Key, provenance and section descriptors of a bundle. A bundle has at most one section of each type."""

    key: Key
    sections: tuple[oci.Descriptor, ...]
    provenance: Provenance
    format_version: str = FORMAT_VERSION

    def serialize_config(self) -> bytes:
        """Return the config blob as canonical JSON."""
        return canonical.serialize(
            {
                "format_version": self.format_version,
                "key": dict(self.key.fields),
                "provenance": self.provenance.to_document(),
            }
        )

    def build_image_manifest(self) -> oci.ImageManifest:
        """Build the OCI image manifest of this bundle."""
        return oci.ImageManifest(
            artifact_type=oci.BUNDLE_TYPE,
            config=oci.describe_blob(self.serialize_config(), oci.CONFIG_TYPE),
            layers=self.sections,
            annotations={
                oci.CREATED: self.provenance.created,
                oci.NAME: self.provenance.model_name,
                oci.KEY: self.key.digest,
            },
        )

    def find_section(self, name: str) -> oci.Descriptor | None:
        """Return the descriptor of the section of type `name`, or None."""
        return next((entry for entry in self.sections if entry.section_type == name), None)


class _Version(msgspec.Struct):
    format_version: oci.Text


class _Config(_Version):
    key: dict[str, Any]
    provenance: Provenance


def parse_manifest(config: bytes, image: oci.ImageManifest) -> Manifest:
    """Parse a bundle's manifest from its config blob and the layers of its image manifest.

    Raises InvalidManifestError, SectionTableError, FormatTooNewError, InvalidKeyError, TooLargeError, InvalidJsonError.
    """
    version = canonical.decode(
        config, _Version, max_bytes=LIMITS.config_bytes, source="config"
    ).format_version
    matched, major = _VERSION.fullmatch(version), FORMAT_VERSION.partition(".")[0]
    if not matched or int(matched[1]) < int(major):
        raise InvalidManifestError(f"invalid format_version {version!r}: expected {major}.MINOR")
    if matched[1] != major:
        raise FormatTooNewError(
            f"bundle format {version} is newer than the supported format {FORMAT_VERSION}"
        )
    read = canonical.decode(config, _Config, max_bytes=LIMITS.config_bytes, source="config")
    manifest = Manifest(Key(read.key), image.layers, read.provenance, read.format_version)
    if image.artifact_type != oci.BUNDLE_TYPE or image.config.media_type != oci.CONFIG_TYPE:
        raise InvalidManifestError(
            f"not a coldstart bundle: the artifact type is {image.artifact_type!r}, the config type {image.config.media_type!r}"
        )
    names = [section.section_type for section in manifest.sections]
    if len(set(names)) != len(names):
        raise SectionTableError("the manifest lists two sections of the same type")
    if image.annotations.get(oci.KEY, manifest.key.digest) != manifest.key.digest:
        raise InvalidManifestError("the key annotation of the manifest does not match the bundle's key")
    return manifest


def is_supported(entry: oci.Descriptor) -> bool:
    """Return whether this version of coldstart can read a section: its type, version and media type are known."""
    known = SECTION_TYPES.get(entry.section_type)
    if known is None or not 1 <= entry.section_version <= known.version:
        return False
    return entry.media_type == replace(known, version=entry.section_version).media_type
