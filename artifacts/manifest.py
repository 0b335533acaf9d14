"""Manifest of a bundle: key, provenance and section table, in the config blob and mirrored by the layers.

parse(write(m)) == m, and the table and the layers of an accepted bundle agree one to one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import cast

from coldstart.artifacts import canonical, fields, oci
from coldstart.artifacts.errors import FormatTooNewError, InvalidManifestError, SectionTableError
from coldstart.artifacts.key import Key, Scalar
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.section import SECTION_TYPES, SectionType

# MAJOR.MINOR: a newer minor version may only add members and section types, which this release ignores.
FORMAT_VERSION = "1.0"
_VERSION = re.compile(r"(0|[1-9]\d{0,3})\.(0|[1-9]\d{0,3})")
_CREATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|\+00:00)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_TYPE = re.compile(r"[a-z][a-z0-9-]{0,63}")
UNPACKED = "dev.coldstart.unpacked-size"
MEMBERS = "dev.coldstart.members"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Provenance of a bundle: `created` in UTC, `seconds` per stage. It contains no path and no host name."""

    created: str
    tool: Mapping[str, str]
    arguments: Sequence[str]
    seconds: Mapping[str, float]
    model_name: str
    host_note: str | None = None

    def __post_init__(self) -> None:
        if not _CREATED.fullmatch(self.created):
            raise InvalidManifestError(f"provenance.created {self.created!r} is not an ISO 8601 time in UTC")
        if not _NAME.fullmatch(self.model_name) or len(self.model_name) > 128:
            raise InvalidManifestError(
                f"provenance.model_name {self.model_name!r} is not a name such as org/model"
            )

    def document(self) -> dict[str, object]:
        """Return the JSON object."""
        return {
            "created": self.created,
            "tool": dict(self.tool),
            "arguments": list(self.arguments),
            "seconds": dict(self.seconds),
            "model_name": self.model_name,
            "host_note": self.host_note,
        }


@dataclass(frozen=True, slots=True)
class SectionEntry:
    """Entry of one section; `size` in bytes as stored."""

    type: str
    version: int
    digest: str
    size: int
    media_type: str
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def layer(self) -> oci.Descriptor:
        """Return the layer that the image manifest must list for this section."""
        return oci.Descriptor(self.media_type, self.digest, self.size)

    def document(self) -> dict[str, object]:
        """Return the JSON object."""
        return {
            "type": self.type,
            "version": self.version,
            "digest": self.digest,
            "size": self.size,
            "media_type": self.media_type,
            "annotations": dict(self.annotations),
        }


@dataclass(frozen=True, slots=True)
class Manifest:
    """Data of a bundle that is known without opening a section. A bundle has at most one section of each type."""

    key: Key
    sections: tuple[SectionEntry, ...]
    provenance: Provenance
    format_version: str = FORMAT_VERSION

    def config(self) -> bytes:
        """Return the canonical bytes of the config blob."""
        return canonical.dumps(
            {
                "format_version": self.format_version,
                "key": dict(self.key.fields),
                "provenance": self.provenance.document(),
                "sections": [section.document() for section in self.sections],
            }
        )

    def image(self) -> oci.ImageManifest:
        """Return the OCI image manifest of this bundle."""
        return oci.ImageManifest(
            artifact_type=oci.BUNDLE_TYPE,
            config=oci.describe(self.config(), oci.CONFIG_TYPE),
            layers=tuple(section.layer for section in self.sections),
            annotations={
                oci.CREATED: self.provenance.created,
                oci.NAME: self.provenance.model_name,
                oci.KEY: self.key.digest,
            },
        )

    def section(self, name: str) -> SectionEntry | None:
        """Return the section of that type, or None."""
        return next((entry for entry in self.sections if entry.type == name), None)


def parse(config: bytes, image: oci.ImageManifest) -> Manifest:
    """Parse the manifest in `config` and check it against the layers of `image`.

    Raises InvalidManifestError, SectionTableError, FormatTooNewError, InvalidKeyError, TooLargeError, InvalidJsonError,
    DuplicateKeyError.
    """
    raw = canonical.loads(config, cap=LIMITS.config, what="config")
    document = fields.mapping(raw, "config")
    version = fields.text(document.get("format_version"), "config.format_version")
    _check_version(version)
    table = fields.items(document.get("sections"), "config.sections", cap=LIMITS.sections)
    manifest = Manifest(
        key=Key(cast("Mapping[str, Scalar]", fields.mapping(document.get("key"), "config.key"))),
        sections=tuple(_section(item, f"config.sections[{n}]") for n, item in enumerate(table)),
        provenance=_provenance(fields.mapping(document.get("provenance"), "config.provenance")),
        format_version=version,
    )
    _check(manifest, image)
    return manifest


def _check_version(version: str) -> None:
    matched = _VERSION.fullmatch(version)
    major = FORMAT_VERSION.partition(".")[0]
    if not matched or int(matched[1]) < int(major):
        raise InvalidManifestError(f"format_version {version!r} is not {major}.MINOR")
    if matched[1] != major:
        raise FormatTooNewError(f"format {version} is newer than {FORMAT_VERSION}")


def _check(manifest: Manifest, image: oci.ImageManifest) -> None:
    if image.artifact_type != oci.BUNDLE_TYPE or image.config.media_type != oci.CONFIG_TYPE:
        raise InvalidManifestError(f"{image.artifact_type} is not a coldstart bundle")
    names = [section.type for section in manifest.sections]
    if len(set(names)) != len(names):
        raise SectionTableError("a section type appears twice in the section table")
    for section, layer in zip_longest(manifest.sections, image.layers):
        if section is None or layer is None or section.layer != layer.bare():
            name = section.type if section else layer.media_type
            raise SectionTableError(f"section {name} and the layers of the manifest differ")
    if image.annotations.get(oci.KEY, manifest.key.digest) != manifest.key.digest:
        raise InvalidManifestError("the manifest's key annotation is not the digest of the key")


def _section(value: object, where: str) -> SectionEntry:
    members = fields.mapping(value, where)
    name = fields.text(members.get("type"), f"{where}.type")
    if not _TYPE.fullmatch(name):
        raise InvalidManifestError(f"{where}.type {name!r} is not a section name")
    return SectionEntry(
        type=name,
        version=fields.count(members.get("version"), f"{where}.version", cap=1 << 16),
        digest=fields.digest(members.get("digest"), f"{where}.digest"),
        size=fields.count(members.get("size"), f"{where}.size", cap=LIMITS.blob),
        media_type=fields.text(members.get("media_type"), f"{where}.media_type"),
        annotations=fields.texts(members.get("annotations"), f"{where}.annotations"),
    )


def _provenance(members: Mapping[str, object]) -> Provenance:
    note = members.get("host_note")
    spent = fields.mapping(members.get("seconds"), "provenance.seconds")
    arguments = fields.items(members.get("arguments"), "provenance.arguments", cap=1024)
    return Provenance(
        created=fields.text(members.get("created"), "provenance.created"),
        tool=fields.texts(members.get("tool"), "provenance.tool"),
        arguments=tuple(fields.text(item, "provenance.arguments") for item in arguments),
        seconds={name: fields.number(item, f"provenance.seconds.{name}") for name, item in spent.items()},
        model_name=fields.text(members.get("model_name"), "provenance.model_name"),
        host_note=None if note is None else fields.text(note, "provenance.host_note"),
    )


def supported(entry: SectionEntry) -> bool:
    """Return whether this release reads the section: known type and version, and their media type."""
    known = SECTION_TYPES.get(entry.type)
    if known is None or not 1 <= entry.version <= known.version:
        return False
    implied = SectionType(known.name, entry.version, known.executable, known.encoding)
    return entry.media_type == implied.media_type
