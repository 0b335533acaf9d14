"""Findings as SARIF 2.1.0 (OASIS standard), the form that code-scanning services take.

One run, one rule per code, one result per finding. The location of a result is the bundle's reference, as a logical location,
because a bundle is not a file of the scanned repository.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256

import coldstart
from coldstart.artifacts.verify import Finding
from coldstart.validate.checks import FailLevel, ValidationReport

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
VERSION = "2.1.0"


def render(reports: Sequence[ValidationReport], fail_level: FailLevel) -> str:
    """Render the log as JSON text. SARIF has the same levels as findings; `fail_level` sets the exit code alone."""
    pairs = [(report, finding) for report in reports for finding in report.findings]
    codes = sorted({finding.code for _, finding in pairs})
    driver = {
        "name": "coldstart",
        "version": coldstart.__version__,
        "rules": [{"id": code, "shortDescription": {"text": code}} for code in codes],
    }
    results = [_result(report, finding, codes) for report, finding in pairs]
    run = {"tool": {"driver": driver}, "columnKind": "utf16CodeUnits", "results": results}
    return json.dumps({"$schema": SCHEMA, "version": VERSION, "runs": [run]}, indent=2)


def _result(report: ValidationReport, finding: Finding, codes: Sequence[str]) -> dict[str, object]:
    hint = f" Hint: {finding.hint}." if finding.hint else ""
    location = {"name": finding.subject, "fullyQualifiedName": f"{report.ref}/{finding.subject}"}
    return {
        "ruleId": finding.code,
        "ruleIndex": codes.index(finding.code),
        "level": finding.severity,
        "message": {"text": f"{report.ref}: {finding.message}.{hint}"},
        "locations": [{"logicalLocations": [location]}],
        "partialFingerprints": {"coldstart/v1": _fingerprint(report, finding)},
    }


def _fingerprint(report: ValidationReport, finding: Finding) -> str:
    return sha256("\0".join([report.ref, finding.code, finding.subject]).encode()).hexdigest()
