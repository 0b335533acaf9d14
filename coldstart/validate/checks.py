"""Check a bundle without starting a server, at level `manifest` or `checksum`. Each level includes the earlier levels.

These levels need neither torch nor vLLM. `load` and `replay` (see `start`) start a server, but only from a bundle that
passed the earlier levels: a damaged bundle, or one for a different machine, is not started.

A machine is described by the hardware and runtime fields of a bundle key, such as {"hardware.cpu.model": "..."}. Model and
engine fields do not depend on the machine and are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from coldstart.artifacts import trees
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.key import Scalar
from coldstart.artifacts.manifest import SECTION_TYPES, is_supported
from coldstart.artifacts.oci import Descriptor

Level = Literal["manifest", "checksum", "load", "replay"]
FailLevel = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("manifest", "checksum", "load", "replay")
SERVER_LEVELS = LEVELS[2:]
SEVERITIES: tuple[FailLevel, ...] = ("note", "warning", "error")


@dataclass(frozen=True, slots=True)
class Finding:
    """Problem found by a check. `code` is stable across versions, and `subject` is the affected section or document."""

    code: str
    severity: FailLevel
    message: str
    hint: str
    subject: str


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """Findings about one bundle. `ref` is NAME@sha256:..., or only the digest if the manifest is unreadable."""

    ref: str
    level: Level
    findings: tuple[Finding, ...]

    def fails(self, level: FailLevel) -> bool:
        """Return whether any finding is at least as severe as `level`."""
        return any(SEVERITIES.index(item.severity) >= SEVERITIES.index(level) for item in self.findings)


def check_bundle(
    bundle: Bundle, level: Level = "checksum", machine: Mapping[str, Scalar] | None = None
) -> ValidationReport:
    """Check a bundle up to `level` without starting a server, and return the report.

    A BundleError becomes a finding; other errors propagate. If `machine` is given, its fields are compared with the key.
    """
    findings = check(bundle, level)
    ref = bundle.digest
    with suppress(BundleError):  # already reported by `check`
        ref = bundle.ref
        findings += compare_machine(bundle.key.fields, machine, bundle.name) if machine else []
    return ValidationReport(ref, level, tuple(findings))


def compare_machine(key: Mapping[str, Scalar], machine: Mapping[str, Scalar], name: str) -> list[Finding]:
    """Return an error for each key field in which `machine` differs from the machine for which the bundle `name` was built."""
    fields = sorted(field for field in {*key, *machine} if field.partition(".")[0] in ("hardware", "runtime"))
    return [
        Finding(
            "CS-KEY-MISMATCH",
            "error",
            f"{field}: the bundle requires {key.get(field)!r}, but the machine has {machine.get(field)!r}",
            f"run on that machine: coldstart materialize {name}",
            field,
        )
        for field in fields
        if key.get(field) != machine.get(field)
    ]


def check(bundle: Bundle, level: Level = "checksum") -> list[Finding]:
    """Return the findings of level `manifest` and, unless `level` is `manifest`, also of level `checksum`.

    `manifest` reads the manifest. `checksum` also verifies the digest and the contents of each section.
    """
    try:
        manifest = bundle.manifest
    except BundleError as error:
        return [_finding_from_error(error, "manifest")]
    findings = [_unknown_section_finding(entry) for entry in manifest.sections if not is_supported(entry)]
    if any(
        argument.partition("=")[2].startswith("/") or argument.startswith("/")
        for argument in manifest.provenance.arguments
    ):
        hint = "materialize again with a newer coldstart"
        findings.append(
            Finding(
                "CS-PROVENANCE", "warning", "the provenance contains a file system path", hint, "provenance"
            )
        )
    for entry in () if level == "manifest" else manifest.sections:
        try:
            _read_section(bundle, entry)
        except BundleError as error:
            findings.append(_finding_from_error(error, entry.section_type))
    return findings


def _read_section(bundle: Bundle, entry: Descriptor) -> None:
    if is_supported(entry) and SECTION_TYPES[entry.section_type].encoding == "json":
        bundle.read_json(entry.section_type)
        return
    with bundle.open_section(entry.section_type) as reader:
        if is_supported(entry):
            trees.read_tree(reader, entry)
        reader.drain()


def _unknown_section_finding(entry: Descriptor) -> Finding:
    section = f"section {entry.section_type} version {entry.section_version}"
    message = f"{section} is not supported by this version of coldstart and was not checked"
    return Finding("CS-SECTION-UNKNOWN", "note", message, "upgrade coldstart to use it", entry.section_type)


def _finding_from_error(error: BundleError, subject: str) -> Finding:
    return Finding(error.code, "error", error.message, error.hint or "", subject)
