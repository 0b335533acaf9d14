"""The levels of `validate`; each level includes the levels before it.

`manifest` and `checksum` need neither torch nor vLLM. `load` and `replay` start a server, and only from a bundle that passed
the earlier levels: a damaged bundle, or one for another machine, is not started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import BundleError
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
        return check(bundle, "manifest" if self.level == "manifest" else "checksum")

    def _fits(self, bundle: Bundle) -> list[Finding]:
        if self.fingerprint is None:
            return []
        try:
            fields = bundle.key.fields
        except BundleError:
            return []  # the check of the manifest has reported it
        return against.compare(fields, self.fingerprint, bundle.name)


def _ref(bundle: Bundle) -> str:
    try:
        return bundle.ref
    except BundleError:
        return bundle.digest
