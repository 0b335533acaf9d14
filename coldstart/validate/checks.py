"""The levels of `validate`; each level includes the levels before it.

`manifest` and `checksum` need neither torch nor vLLM. `load` and `replay` start a server, and only from a bundle that passed
the earlier levels: a damaged bundle, or one for another machine, is not started.

A machine is the hardware and runtime fields of a key, such as {"hardware.cpu.model": "..."}. Model and engine fields do not
depend on the machine and are never compared.
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
from coldstart.artifacts.manifest import SECTION_TYPES, supported
from coldstart.artifacts.oci import Descriptor

Level = Literal["manifest", "checksum", "load", "replay"]
FailLevel = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("manifest", "checksum", "load", "replay")
STARTING = LEVELS[2:]
SEVERITIES: tuple[FailLevel, ...] = ("note", "warning", "error")


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding of a check: `code` is stable; `subject` is the section or document that it concerns."""

    code: str
    severity: FailLevel
    message: str
    hint: str
    subject: str


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """The findings about one bundle; `ref` is NAME@sha256:... where it could be read."""

    ref: str
    level: Level
    findings: tuple[Finding, ...]

    def fails(self, level: FailLevel) -> bool:
        """Return whether a finding is at least as severe as `level`."""
        return any(SEVERITIES.index(item.severity) >= SEVERITIES.index(level) for item in self.findings)


def check_bundle(
    bundle: Bundle, level: Level = "checksum", machine: Mapping[str, Scalar] | None = None
) -> ValidationReport:
    """Check a bundle up to `level` without starting a server.

    An error in the bundle becomes a finding; any other error is raised. If `machine` is given, the bundle's key is compared
    with its fields.
    """
    findings = check(bundle, level)
    ref = bundle.digest
    with suppress(BundleError):  # the check of the manifest has reported it
        ref = bundle.ref
        findings += compare_machine(bundle.key.fields, machine, bundle.name) if machine else []
    return ValidationReport(ref, level, tuple(findings))


def compare_machine(key: Mapping[str, Scalar], machine: Mapping[str, Scalar], name: str) -> list[Finding]:
    """Return one error for each field in which the machine differs from the machine of the bundle."""
    fields = sorted(field for field in {*key, *machine} if field.partition(".")[0] in ("hardware", "runtime"))
    return [
        Finding(
            "CS-KEY-MISMATCH",
            "error",
            f"{field}: the bundle requires {key.get(field)!r}, the machine has {machine.get(field)!r}",
            f"on that machine: coldstart materialize {name}",
            field,
        )
        for field in fields
        if key.get(field) != machine.get(field)
    ]


def check(bundle: Bundle, level: Level = "checksum") -> list[Finding]:
    """Return the findings of the levels up to `level` that start no server.

    `manifest` reads the declarations of the bundle. `checksum` verifies each blob, and reads each tree and document.
    """
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
    for entry in () if level == "manifest" else manifest.sections:
        try:
            _read(bundle, entry)
        except BundleError as error:
            findings.append(_finding(error, entry.type))
    return findings


def _read(bundle: Bundle, entry: Descriptor) -> None:
    if supported(entry) and SECTION_TYPES[entry.type].encoding == "json":
        bundle.json(entry.type)
        return
    with bundle.open_blob(entry.type) as reader:
        if supported(entry):
            trees.scan(reader, entry)
        reader.drain()


def _unknown(entry: Descriptor) -> Finding:
    message = (
        f"section {entry.type} version {entry.version} cannot be read by this release; it is not checked"
    )
    return Finding("CS-SECTION-UNKNOWN", "note", message, "upgrade coldstart to use it", entry.type)


def _finding(error: BundleError, subject: str) -> Finding:
    return Finding(error.code, "error", error.message, error.hint or "", subject)
