"""Levels of validate that need no engine.

`manifest` reads the declarations of the bundle, `checksum` all of its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from coldstart.artifacts import trees
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.manifest import SECTION_TYPES, SectionEntry, supported

Level = Literal["manifest", "checksum"]
Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding of a check: `code` is stable; `subject` is the section or document that it concerns."""

    code: str
    severity: Severity
    message: str
    hint: str
    subject: str


def check(bundle: Bundle, level: Level = "checksum") -> list[Finding]:
    """Return the findings at `level`: `checksum` includes `manifest`, verifies each blob, and reads each tree and document."""
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
    for entry in manifest.sections if level == "checksum" else ():
        try:
            _read(bundle, entry)
        except BundleError as error:
            findings.append(_finding(error, entry.type))
    return findings


def _read(bundle: Bundle, entry: SectionEntry) -> None:
    if supported(entry) and SECTION_TYPES[entry.type].encoding == "json":
        bundle.json(entry.type)
        return
    with bundle.open_blob(entry.type) as reader:
        if supported(entry):
            trees.scan(reader, entry)
        reader.drain()


def _unknown(entry: SectionEntry) -> Finding:
    message = (
        f"section {entry.type} version {entry.version} cannot be read by this release; it is not checked"
    )
    return Finding("CS-SECTION-UNKNOWN", "note", message, "upgrade coldstart to use it", entry.type)


def _finding(error: BundleError, subject: str) -> Finding:
    return Finding(error.code, "error", error.message, error.hint or "", subject)
