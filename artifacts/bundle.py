"""Read published bundles lazily, and rank their versions.

The manifest is read first, and sections are read on demand. Every digest is verified. Code is unpacked only if the bundle
is trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from coldstart.artifacts import blobs, canonical, manifest, oci
from coldstart.artifacts.errors import (
    BundleError,
    IndexMismatchError,
    SectionMissingError,
    SectionUnsupportedError,
    UntrustedError,
)
from coldstart.artifacts.key import Key
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.manifest import SECTION_TYPES, Manifest, is_supported
from coldstart.artifacts.oci_layout import OciLayout, read_small_blob


@dataclass(frozen=True, slots=True)
class TrustResult:
    """Result of a trust check: whether the bundle's code may run, the fingerprint of the signer's key, and the reason."""

    is_trusted: bool
    signer: str | None
    reason: str

    def to_document(self) -> dict[str, Any]:
        """Return the JSON form that commands print."""
        return {"ok": self.is_trusted, "signer": self.signer, "reason": self.reason}


TrustCheck = Callable[["Bundle"], TrustResult]


def accept_any(bundle: Bundle) -> TrustResult:
    """Accept any bundle. Callers pass this function as the trust check to allow code without a trusted signature."""
    return TrustResult(True, None, f"{bundle.name} was not checked: the caller allows untrusted code")


@dataclass(frozen=True, eq=False)
class Bundle:
    """One published version of the artifacts for one key.

    `layout` contains the blobs, and `descriptor` is the index entry of the image manifest. `replaced_blobs` is the number
    of damaged blobs in the store that were replaced when this bundle was received.
    """

    layout: OciLayout = field(repr=False)
    descriptor: oci.Descriptor
    replaced_blobs: int = 0

    def __eq__(self, other: object) -> bool:
        # The digest identifies all content; version and index annotations belong to the store.
        return isinstance(other, Bundle) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def version(self) -> int:
        """Return the version number among the bundles of this model name, or 0 if another tool wrote the index entry."""
        return self.descriptor.listed_version

    @property
    def digest(self) -> str:
        """Return the digest sha256:<hex> of the image manifest, which contains the digests of all blobs of the bundle."""
        return self.descriptor.digest

    @cached_property
    def image_manifest(self) -> oci.ImageManifest:
        """Read, verify and parse the OCI image manifest.

        Raises DigestMismatchError, MissingBlobError, InvalidManifestError, InvalidJsonError, TooLargeError.
        """
        return oci.parse_manifest(self.read_image_manifest())

    def read_image_manifest(self) -> bytes:
        """Read the stored bytes of the image manifest and verify their digest."""
        return read_small_blob(self.layout, self.descriptor, LIMITS.manifest_bytes)

    @cached_property
    def manifest(self) -> Manifest:
        """Read the key, the provenance and the section table.

        Raises the errors of `image_manifest`, IndexMismatchError, SectionTableError and FormatTooNewError.
        """
        config = read_small_blob(self.layout, self.image_manifest.config, LIMITS.config_bytes)
        parsed = manifest.parse_manifest(config, self.image_manifest)
        annotations = self.descriptor.annotations
        indexed = (
            annotations.get(oci.NAME, parsed.provenance.model_name),
            annotations.get(oci.KEY, parsed.key.digest),
        )
        if indexed != (parsed.provenance.model_name, parsed.key.digest):
            raise IndexMismatchError(
                f"the index has model {indexed[0]} and key {indexed[1]}, but the bundle has "
                f"model {parsed.provenance.model_name} and key {parsed.key.digest}"
            )
        return parsed

    @cached_property
    def name(self) -> str:
        """Return the model name from the index entry, or from the manifest if the entry does not contain it."""
        return self.descriptor.annotations.get(oci.NAME) or self.manifest.provenance.model_name

    @cached_property
    def key_digest(self) -> str:
        """Return the digest of the key from the index entry, or from the manifest if the entry does not contain it."""
        return self.descriptor.annotations.get(oci.KEY) or self.manifest.key.digest

    @property
    def identity(self) -> tuple[str, str]:
        """Return the model name and the key digest. Both are empty if the index lacks them and the manifest is unreadable."""
        try:
            return self.name, self.key_digest
        except BundleError:
            return "", ""

    @property
    def key(self) -> Key:
        """Return the key from the manifest."""
        return self.manifest.key

    @property
    def ref(self) -> str:
        """Return the unique reference NAME@sha256:..."""
        return f"{self.name}@{self.digest}"

    @property
    def size_bytes(self) -> int:
        """Return the stored size of all sections in bytes."""
        return sum(section.size for section in self.manifest.sections)

    def has_section(self, name: str) -> bool:
        """Return whether the bundle has a section of type `name` that this version of coldstart can read."""
        entry = self.manifest.find_section(name)
        return entry is not None and is_supported(entry)

    def find_readable_section(self, name: str) -> oci.Descriptor:
        """Return the descriptor of the section of type `name`. Raises SectionMissingError or SectionUnsupportedError."""
        if not is_supported(entry := self._find_section(name)):
            raise SectionUnsupportedError(
                f"section {name} has version {entry.section_version} ({entry.media_type}), which this "
                "version of coldstart cannot read"
            )
        return entry

    def read_json(self, name: str) -> object:
        """Read a JSON section.

        Raises SectionMissingError, SectionUnsupportedError, DigestMismatchError, MissingBlobError, InvalidJsonError.
        """
        entry = self.find_readable_section(name)
        if SECTION_TYPES[name].encoding != "json":
            raise SectionUnsupportedError(
                f"section {name} is a directory tree, not JSON",
                hint="unpack the section with `coldstart inspect REF --tree`",
            )
        data = read_small_blob(self.layout, entry, LIMITS.json_section_bytes)
        return canonical.decode(data, object, max_bytes=LIMITS.json_section_bytes, source=f"section {name}")

    def extract_section(self, name: str, dest: Path, *, trust: TrustCheck) -> int:
        """Unpack a tree section into the new directory `dest` atomically, and return the number of entries.

        A section with code is unpacked only if `trust` accepts the bundle; pass `accept_any` to allow any code. Raises
        UntrustedError, DestinationExistsError, DigestMismatchError, MissingBlobError, ArchiveBombError, InvalidTreeError,
        UnsafePathError, UnsafeLinkError, UnsafeMemberError, DuplicateMemberError, NoSpaceError.
        """
        from coldstart.artifacts import trees  # Not needed by a start whose trees are already unpacked.

        entry, declared = self.find_readable_section(name), SECTION_TYPES[name]
        if declared.encoding != "tar.zst":
            raise SectionUnsupportedError(
                f"section {name} is JSON, not a directory tree", hint="read the section with Bundle.read_json"
            )
        if declared.executable:
            self.require_trust(name, trust)
        with self.open_section(name) as reader:
            return trees.extract_tree(reader, entry, dest)

    def open_section(self, name: str) -> blobs.VerifiedReader:
        """Return a stream of a section's stored bytes. Reading to the end raises DigestMismatchError if they are damaged."""
        entry = self._find_section(name)
        return blobs.open_verified(self.layout.root, entry.digest, entry.size)

    def _find_section(self, name: str) -> oci.Descriptor:
        entry = self.manifest.find_section(name)
        if entry is None:
            raise SectionMissingError(f"bundle {self.name}:v{self.version} has no section {name}")
        return entry

    def require_trust(self, name: str, trust: TrustCheck) -> None:
        """Raise UntrustedError unless `trust` allows the bundle's code in section `name` to run."""
        result = trust(self)
        if not result.is_trusted:
            raise UntrustedError(
                f"section {name} of {self.ref} contains code that is not trusted: {result.reason}"
            )


_NOT_CHECKED = TrustResult(True, None, "trust was not checked")


@dataclass(frozen=True, slots=True)
class RankedBundle:
    """Bundle with the values that determine its rank. `read_error` is the reason why it cannot be read, or None."""

    bundle: Bundle
    created_at: str
    trust: TrustResult
    read_error: BundleError | None = None

    @property
    def rank(self) -> tuple[bool, bool, str, int]:
        """Return the sort key; a larger key is better. Readable bundles rank first, then trusted ones, then newer ones."""
        return self.read_error is None, self.trust.is_trusted, self.created_at, self.bundle.version


def rank_bundle(bundle: Bundle, trust: TrustCheck | None) -> RankedBundle:
    """Return `bundle` as a ranked candidate. If `trust` is None, every bundle counts as trusted."""
    try:
        created = bundle.manifest.provenance.created
        return RankedBundle(bundle, created, trust(bundle) if trust else _NOT_CHECKED)
    except BundleError as error:
        return RankedBundle(bundle, "", TrustResult(False, None, error.message), error)


def sort_best_first(bundles: Iterable[Bundle], trust: TrustCheck | None) -> list[RankedBundle]:
    """Return `bundles` as ranked candidates, best first."""
    return sorted((rank_bundle(bundle, trust) for bundle in bundles), key=lambda one: one.rank, reverse=True)


def find_newer(bundle: Bundle, others: Iterable[Bundle], trust: TrustCheck | None) -> list[Bundle]:
    """Return the trusted bundles in `others` that have the same key as `bundle` and are newer."""
    same = [other for other in others if other != bundle and other.key_digest == bundle.key_digest]
    created = rank_bundle(bundle, None).created_at
    return [
        one.bundle
        for one in sort_best_first(same, trust)
        if one.trust.is_trusted and one.created_at > created
    ]


def find_superseded(bundles: Sequence[Bundle], keep: int, trust: TrustCheck | None) -> set[str]:
    """Return the digests of all readable bundles except the best `keep` of each key.

    Unreadable bundles are kept, because a newer version of coldstart may be able to read them.
    """
    keys: dict[str, list[Bundle]] = {}
    for bundle in bundles:
        if rank_bundle(bundle, None).read_error is None:
            keys.setdefault(bundle.key_digest, []).append(bundle)
    ordered = (sort_best_first(group, trust) for group in keys.values())
    return {one.bundle.digest for group in ordered for one in group[keep:]}
