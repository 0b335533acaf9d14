"""The levels of `validate`; each level includes the levels before it.

`manifest` and `checksum` need neither torch nor vLLM. `load` and `replay` start a server, and only from a bundle that passed
the earlier levels: a damaged bundle, or one for another machine, is not started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.bundle_source import BundleSource
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.store import Store
from coldstart.artifacts.verify import Finding, check
from coldstart.validate import against

Level = Literal["manifest", "checksum", "load", "replay"]
FailLevel = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("manifest", "checksum", "load", "replay")
SEVERITIES: tuple[FailLevel, ...] = ("note", "warning", "error")
Scalar = str | int | float | bool | None
StartCheck = Callable[[Bundle, Level], list[Finding]]


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """The findings about one bundle; `ref` is NAME@sha256:... where it could be read."""

    ref: str
    level: Level
    findings: tuple[Finding, ...]

    def fails(self, level: FailLevel) -> bool:
        """Return whether a finding is at least as severe as `level`."""
        return any(SEVERITIES.index(item.severity) >= SEVERITIES.index(level) for item in self.findings)


@dataclass(frozen=True)
class Validation:
    """The level, the fingerprint to compare the key with, and the check that starts servers for load and replay."""

    level: Level = "checksum"
    fingerprint: Mapping[str, Scalar] | None = None
    start: StartCheck | None = None

    def run(self, bundle: Bundle) -> ValidationReport:
        """Check a bundle. An error of the bundle is a finding; any other error is raised."""
        findings = [*self._stored(bundle), *self._fits(bundle)]
        report = ValidationReport(_ref(bundle), self.level, tuple(findings))
        if self.level in ("load", "replay") and self.start and not report.fails("error"):
            findings += self.start(bundle, self.level)
        return ValidationReport(report.ref, self.level, tuple(findings))

    def _stored(self, bundle: Bundle) -> list[Finding]:
        found = check(bundle, "manifest" if self.level == "manifest" else "checksum")
        return [replace(one, hint=one.hint.replace(" REF ", f" {_ref(bundle)} ")) for one in found]

    def _fits(self, bundle: Bundle) -> list[Finding]:
        if self.fingerprint is None:
            return []
        try:
            fields = bundle.key.fields
        except BundleError:
            return []  # the check of the manifest has reported it
        return against.compare(fields, self.fingerprint, bundle.name)


def repair(store: Store, bundle: Bundle, sources: Iterable[BundleSource]) -> list[Finding]:
    """Fetch the damaged blobs again. A repaired blob is a note, any other damaged blob an error.

    Raises ReadOnlyStoreError and NoSpaceError.
    """
    return [
        Finding(
            "CS-REPAIRED",
            "note",
            f"{item.digest} was repaired, {item.fetched} bytes fetched",
            "",
            item.subject,
        )
        if item.repaired
        else Finding("CS-UNREPAIRED", "error", item.reason, _REPAIR_HINT, item.subject)
        for item in store.repair(bundle, list(sources))
    ]


def prepend_notes(report: ValidationReport, notes: Sequence[Finding]) -> ValidationReport:
    """Return `report` with the findings of a repair before its own, which do not advise a repair that has just failed."""
    failed = {note.subject for note in notes if note.code == "CS-UNREPAIRED"}
    own = [replace(one, hint="") if one.subject in failed else one for one in report.findings]
    return ValidationReport(report.ref, report.level, (*notes, *own))


_REPAIR_HINT = (
    "pass an address that has the blob with --repair-from ADDRESS, or run coldstart materialize MODEL"
)


def _ref(bundle: Bundle) -> str:
    try:
        return bundle.ref
    except BundleError:
        return bundle.digest
