"""Published bundle, read lazily, and the choice among several versions.

The manifest is read first and sections on demand. Each digest is verified. Code is unpacked only if it is trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

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
from coldstart.artifacts.manifest import SECTION_TYPES, Manifest, supported
from coldstart.artifacts.oci_layout import small

if TYPE_CHECKING:
    from coldstart.artifacts.oci_layout import OciLayout


@dataclass(frozen=True, slots=True)
class TrustResult:
    """Result of a trust check: whether a bundle's code may run.

    `signer` is the fingerprint of the key, `reason` explains the result.
    """

    ok: bool
    signer: str | None
    reason: str


Trust = Callable[["Bundle"], TrustResult]


def anyone(bundle: Bundle) -> TrustResult:
    """Accept any bundle: the explicit override for code without a trusted signature."""
    return TrustResult(True, None, f"{bundle.name} was not checked: the caller allows untrusted code")


@dataclass(frozen=True, eq=False)
class Bundle:
    """One version of one key's artifacts.

    `layout` holds its blobs. `digest` is that of the image manifest and names all of the content. `replaced` is the number of
    damaged blobs that its reception replaced.
    """

    layout: OciLayout = field(repr=False)
    descriptor: oci.Descriptor
    replaced: int = 0

    def __eq__(self, other: object) -> bool:
        # The digest identifies all content; version and index annotations belong to the store.
        return isinstance(other, Bundle) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def version(self) -> int:
        """Return the version of the model's name in this store; 0 if another tool wrote the index entry."""
        return self.descriptor.listed_version

    @property
    def digest(self) -> str:
        """Return sha256:<hex> of the image manifest."""
        return self.descriptor.digest

    @cached_property
    def image(self) -> oci.ImageManifest:
        """Return the OCI image manifest.

        Raises DigestMismatchError, MissingBlobError, InvalidManifestError, InvalidJsonError, TooLargeError.
        """
        return oci.parse_manifest(self.image_bytes())

    def image_bytes(self) -> bytes:
        """Read and verify the stored bytes of the image manifest."""
        return self._read(self.descriptor, LIMITS.manifest)

    def _read(self, blob: oci.Descriptor, cap: int) -> bytes:
        return small(self.layout, blob, cap)

    @cached_property
    def manifest(self) -> Manifest:
        """Return key, provenance and section table.

        Raises the errors of `image`, IndexMismatchError, SectionTableError and FormatTooNewError.
        """
        parsed = manifest.parse(self._read(self.image.config, LIMITS.config), self.image)
        says = self.descriptor.annotations
        named = (says.get(oci.NAME, parsed.provenance.model_name), says.get(oci.KEY, parsed.key.digest))
        if named != (parsed.provenance.model_name, parsed.key.digest):
            raise IndexMismatchError(
                f"the index has model {named[0]} and key {named[1]}, the bundle has "
                f"model {parsed.provenance.model_name} and key {parsed.key.digest}"
            )
        return parsed

    @cached_property
    def name(self) -> str:
        """Return the name of the model, from the index if it lists one, otherwise from the manifest."""
        return self.descriptor.annotations.get(oci.NAME) or self.manifest.provenance.model_name

    @cached_property
    def key_digest(self) -> str:
        """Return the digest of the key, from the index if it lists one, otherwise from the manifest."""
        return self.descriptor.annotations.get(oci.KEY) or self.manifest.key.digest

    @property
    def identity(self) -> tuple[str, str]:
        """Return name and key digest; empty strings if neither the index nor a readable manifest has them."""
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
    def size(self) -> int:
        """Return the bytes of all sections as stored."""
        return sum(section.size for section in self.manifest.sections)

    def has(self, name: str) -> bool:
        """Return whether the bundle has a section of this type that this release can read."""
        entry = self.manifest.section(name)
        return entry is not None and supported(entry)

    def entry(self, name: str) -> oci.Descriptor:
        """Return the entry of a readable section. Raises SectionMissingError or SectionUnsupportedError."""
        if not supported(entry := self._find_section(name)):
            raise SectionUnsupportedError(
                f"section {name} has version {entry.version} ({entry.media_type}), which this release cannot read"
            )
        return entry

    def json(self, name: str) -> object:
        """Read a JSON section.

        Raises SectionMissingError, SectionUnsupportedError, DigestMismatchError, MissingBlobError, InvalidJsonError.
        """
        entry = self.entry(name)
        if SECTION_TYPES[name].encoding != "json":
            raise SectionUnsupportedError(
                f"section {name} is a tree", hint="unpack it: coldstart inspect REF --tree"
            )
        data = self._read(entry, LIMITS.json_section)
        return canonical.loads(data, cap=LIMITS.json_section, what=f"section {name}")

    def extract(self, name: str, dest: Path, *, trust: Trust | None = None) -> int:
        """Unpack a tree section to the new directory `dest`, which appears complete or not at all.

        An executable section is unpacked only if `trust` accepts the bundle; `anyone` is the explicit override. Returns the
        number of members. Raises UntrustedError, DestinationExistsError, DigestMismatchError, MissingBlobError,
        ArchiveBombError, InvalidTreeError, UnsafePathError, UnsafeLinkError, UnsafeMemberError, DuplicateMemberError,
        NoSpaceError.
        """
        from coldstart.artifacts import trees  # A start whose trees are already unpacked does not need it.

        entry, declared = self.entry(name), SECTION_TYPES[name]
        if declared.encoding != "tar.zst":
            raise SectionUnsupportedError(f"section {name} is not a tree", hint="read it with Bundle.json")
        if declared.executable:
            self.require_trust(name, trust)
        with self.open_blob(name) as reader:
            return trees.extract(reader, entry, dest)

    def open_blob(self, name: str) -> blobs.VerifiedReader:
        """Open a section as stored; reading to the end raises DigestMismatchError if it is damaged."""
        entry = self._find_section(name)
        return blobs.open_verified(self.layout.root, entry.digest, entry.size)

    def _find_section(self, name: str) -> oci.Descriptor:
        entry = self.manifest.section(name)
        if entry is None:
            raise SectionMissingError(f"{self.name} v{self.version} has no section {name}")
        return entry

    def require_trust(self, name: str, trust: Trust | None) -> None:
        """Raise UntrustedError unless `trust` accepts the bundle as the source of the code in section `name`."""
        if trust is None:
            raise UntrustedError(f"section {name} is code and no trust was given")
        result = trust(self)
        if not result.ok:
            raise UntrustedError(f"section {name} of {self.ref} is code and is not trusted: {result.reason}")


_UNJUDGED = TrustResult(True, None, "nobody asked")


@dataclass(frozen=True, slots=True)
class Candidate:
    """Bundle with its rank; `problem` is the reason why it cannot be read here."""

    bundle: Bundle
    created: str
    trust: TrustResult
    problem: BundleError | None = None

    @property
    def rank(self) -> tuple[bool, bool, str, int]:
        """Return the rank; a larger one is better."""
        return self.problem is None, self.trust.ok, self.created, self.bundle.version


def rank_bundle(bundle: Bundle, trust: Trust | None) -> Candidate:
    """Return `bundle` with its rank; without `trust` all are equally trusted."""
    try:
        created = bundle.manifest.provenance.created
        return Candidate(bundle, created, trust(bundle) if trust else _UNJUDGED)
    except BundleError as error:
        return Candidate(bundle, "", TrustResult(False, None, error.message), error)


def best_first(bundles: Iterable[Bundle], trust: Trust | None) -> list[Candidate]:
    """Return all candidates, the best first."""
    return sorted((rank_bundle(bundle, trust) for bundle in bundles), key=lambda one: one.rank, reverse=True)


def describe_choice(bundle: Bundle, versions: Sequence[Bundle], trust: Trust | None) -> str:
    """Return which of the `versions` the best one, `bundle`, is: the newest, or the newest readable or trusted."""
    ranked = best_first(versions, trust)
    chosen = next(one for one in ranked if one.bundle == bundle)
    if chosen.problem is None and ranked[-1].problem is not None:
        what = "newest readable"
    elif any((one.created, one.bundle.version) > (chosen.created, bundle.version) for one in ranked):
        what = "newest trusted"
    else:
        what = "newest"
    return f"{bundle.name}:v{bundle.version}, the {what} of {len(versions)}"


def newer_than(bundle: Bundle, others: Iterable[Bundle], trust: Trust | None) -> list[Bundle]:
    """Return the trusted bundles of `others` with the same key that are newer than `bundle`."""
    same = [other for other in others if other != bundle and other.key_digest == bundle.key_digest]
    created = rank_bundle(bundle, None).created
    return [one.bundle for one in best_first(same, trust) if one.trust.ok and one.created > created]


def superseded(bundles: Sequence[Bundle], keep: int, trust: Trust | None) -> set[str]:
    """Return the digests of all but the best `keep` of each key. Unreadable bundles are retained for another release."""
    keys: dict[str, list[Bundle]] = {}
    for bundle in bundles:
        if rank_bundle(bundle, None).problem is None:
            keys.setdefault(bundle.key_digest, []).append(bundle)
    ordered = (best_first(group, trust) for group in keys.values())
    return {one.bundle.digest for group in ordered for one in group[keep:]}
