"""Draft of a bundle.

Sections are written to staging. publish() makes all of them visible with one rename, or none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from coldstart.artifacts import canonical, oci, trees
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import SectionTableError, SectionUnsupportedError, TooLargeError
from coldstart.artifacts.key import Key
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.manifest import (
    SECTION_TYPES,
    Encoding,
    Manifest,
    Provenance,
    SectionEntry,
    SectionType,
    parse,
)
from coldstart.artifacts.writer import HashingFile, Staging


class Signer(Protocol):
    """Signer of bundles, which creates the signature document over a manifest's digest."""

    def sign(self, digest: str) -> bytes: ...


@dataclass
class Draft:
    """Bundle that Store.begin opens. If the `with` block ends without publish(), all files are removed."""

    key: Key
    staging: Staging
    sections: dict[str, SectionEntry] = field(default_factory=dict)

    def add_json(self, name: str, value: object) -> SectionEntry:
        """Add a JSON section.

        Raises SectionTableError, SectionUnsupportedError, InvalidJsonError, TooLargeError or NoSpaceError.
        """
        declared = self._declared(name, "json")
        data = canonical.dumps(value)
        if len(data) > LIMITS.json_section:
            raise TooLargeError(f"section {name} is {len(data)} bytes, the cap is {LIMITS.json_section}")
        with self.staging.file() as file:
            file.write(data)
        return self._enter(declared, file)

    def add_tree(self, name: str, directory: Path) -> SectionEntry:
        """Add a directory as one tar.zst.

        Raises SectionTableError, SectionUnsupportedError, NoSpaceError and the errors of trees.pack.
        """
        declared = self._declared(name, "tar.zst")
        with self.staging.file() as file:
            trees.pack(directory, cast("BinaryIO", file))
        return self._enter(declared, file)

    def keep(self, bundle: Bundle, name: str) -> SectionEntry:
        """Copy a section of an earlier bundle unchanged.

        Raises DigestMismatchError, SectionMissingError, NoSpaceError.
        """
        entry = bundle.entry(name)
        self._declared(name, SECTION_TYPES[name].encoding)
        with bundle.open_blob(name) as reader, self.staging.file() as file:
            while data := reader.read(1 << 20):
                file.write(data)
        self.sections[name] = entry
        return entry

    def publish(self, provenance: Provenance, *, signer: Signer | None = None) -> Bundle:
        """Publish the bundle as the key's next version, durable and complete; the signature is part of the same step.

        Raises NoSpaceError, ReadOnlyStoreError, TooLargeError, InvalidManifestError.
        """
        manifest = Manifest(
            self.key, tuple(self.sections[name] for name in sorted(self.sections)), provenance
        )
        image = manifest.image()
        parse(manifest.config(), image)  # A bundle that no reader accepts must not be published.
        self.staging.put(manifest.config(), oci.CONFIG_TYPE)
        descriptor = self.staging.put(image.document(), oci.MANIFEST_TYPE)
        signatures = [signer.sign(descriptor.digest)] if signer else []
        identity = {name: image.annotations[name] for name in (oci.NAME, oci.KEY)}
        return self.staging.publish(descriptor, identity, signatures)

    def _enter(self, declared: SectionType, file: HashingFile) -> SectionEntry:
        entry = SectionEntry(declared.media_type, file.digest, file.size)
        self.sections[declared.name] = entry
        return entry

    def _declared(self, name: str, encoding: Encoding) -> SectionType:
        declared = SECTION_TYPES.get(name)
        if declared is None or declared.encoding != encoding:
            raise SectionUnsupportedError(f"no section type has the name {name} and the encoding {encoding}")
        if name in self.sections:
            raise SectionTableError(f"section {name} was added already")
        return declared
