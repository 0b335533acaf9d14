"""Levels of validate that need no engine.

`manifest` reads the declarations of the bundle, `checksum` all of its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from coldstart.artifacts import blobs, canonical, trees
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.manifest import Manifest, SectionEntry, supported
from coldstart.artifacts.oci_layout import OciLayout
from coldstart.artifacts.section import SECTION_TYPES

Level = Literal["manifest", "checksum"]
Severity = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("manifest", "checksum")


class BundleContent(Protocol):
    """Parts of a bundle that a check reads."""

    @property
    def layout(self) -> OciLayout:
        """Return the layout with the blobs."""
        ...

    @property
    def manifest(self) -> Manifest:
        """Return key, provenance and section table. Raises BundleError for a document that violates the format."""
        ...


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding of a check: `code` is stable; `subject` is the section or document that it concerns."""

    code: str
    severity: Severity
    message: str
    hint: str
    subject: str


def check(bundle: BundleContent, level: Level) -> list[Finding]:
    """Return the findings at `level`, which includes the levels before it."""
    return check_manifest(bundle) if level == "manifest" else check_checksum(bundle)


def check_manifest(bundle: BundleContent) -> list[Finding]:
    """Check index entry, image manifest, config, key, section table and provenance; open no section."""
    try:
        manifest = bundle.manifest
    except BundleError as error:
        return [_finding(error, "manifest")]
    findings = [_unknown(entry) for entry in manifest.sections if not supported(entry)]
    if any(
        argument.partition("=")[2].startswith("/") or argument.startswith("/")
        for argument in manifest.provenance.arguments
    ):
        hint = "materialize again with a newer coldstart"
        findings.append(Finding("CS-PROVENANCE", "warning", "provenance contains a path", hint, "provenance"))
    return findings


def check_checksum(bundle: BundleContent) -> list[Finding]:
    """Run `check_manifest`, verify the digest of each blob, and read each tree and JSON section."""
    findings = check_manifest(bundle)
    if any(finding.subject == "manifest" for finding in findings):
        return findings
    return findings + [item for entry in bundle.manifest.sections for item in _section(bundle, entry)]


def _section(bundle: BundleContent, entry: SectionEntry) -> list[Finding]:
    try:
        if not supported(entry) or SECTION_TYPES[entry.type].encoding == "raw":
            fault = blobs.fault(bundle.layout.root, entry.digest, entry.size)
            return [_finding(fault, entry.type)] if fault else []
        _open(bundle, entry)
    except BundleError as error:
        return [_finding(error, entry.type)]
    return []


def _open(bundle: BundleContent, entry: SectionEntry) -> None:
    declared = SECTION_TYPES[entry.type]
    with blobs.open_verified(bundle.layout.root, entry.digest, entry.size) as reader:
        if declared.encoding == "tar.zst":
            trees.scan(reader, entry)
            return
    data = blobs.read(bundle.layout.root, entry.digest, entry.size, cap=LIMITS.json_section)
    canonical.loads(data, cap=LIMITS.json_section, what=f"section {entry.type}")


def _unknown(entry: SectionEntry) -> Finding:
    message = (
        f"section {entry.type} version {entry.version} cannot be read by this release; it is not checked"
    )
    return Finding("CS-SECTION-UNKNOWN", "note", message, "upgrade coldstart to use it", entry.type)


def _finding(error: BundleError, subject: str) -> Finding:
    return Finding(error.code, "error", error.message, error.hint or "", subject)
