"""Render findings as text, JSON, JUnit XML and GitHub workflow commands.

JUnit: the <testsuites>/<testsuite>/<testcase>/<failure> form that CI systems read (Ant's JUnit report).
GitHub: `::error title=...::message`, with %, CR, LF escaped in data, and : and , as well in properties
(GitHub, "Workflow commands").
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from coldstart.errors import ColdstartError
from coldstart.system import secrets
from coldstart.validate.checks import FailLevel, Finding, ValidationReport

GITHUB_COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}


def document(reports: Sequence[ValidationReport], fail_level: FailLevel) -> Mapping[str, object]:
    """Build the JSON result."""
    bundles = [
        {
            "ref": report.ref,
            "ok": not report.fails(fail_level),
            "findings": [asdict(finding) for finding in report.findings],
        }
        for report in reports
    ]
    level = reports[0].level if reports else None
    return {"level": level, "ok": all(bundle["ok"] for bundle in bundles), "bundles": bundles}


def text(reports: Sequence[ValidationReport], fail_level: FailLevel) -> str:
    """Render one line per bundle, and below it one or two lines per finding."""
    lines = []
    for report in reports:
        verdict = "invalid" if report.fails(fail_level) else "valid"
        lines.append(f"{report.ref}: {verdict} at level {report.level}")
        for finding in report.findings:
            message = "\n      | ".join(finding.message.splitlines())  # the end of a log has several lines
            lines.append(f"  {finding.severity} {finding.code} [{finding.subject}] {message}")
            lines += [f"    hint: {finding.hint}"] if finding.hint else []
    return "\n".join(lines)


def junit(reports: Sequence[ValidationReport], fail_level: FailLevel) -> str:
    """Render one JUnit suite: a case per bundle without findings, and a case per finding."""
    return _suite([case for report in reports for case in _cases(report, fail_level)])


def junit_of_error(words: Sequence[str], level: str, error: ColdstartError) -> str:
    """Render one JUnit suite with one case, for an error that prevents the check of the bundles that `words` name."""
    case = ElementTree.Element("testcase", {"classname": _xml(" ".join(words)), "name": level})
    about = {"type": type(error).__name__, "message": _xml(secrets.text(error.message))}
    hint = f"\nhint: {error.hint}" if error.hint else ""
    ElementTree.SubElement(case, "error", about).text = _xml(secrets.text(error.message + hint))
    return _suite([case])


def _suite(cases: Sequence[ElementTree.Element]) -> str:
    failed, broken = (
        str(sum(case.find(kind) is not None for case in cases)) for kind in ("failure", "error")
    )
    counts = {"tests": str(len(cases)), "failures": failed, "errors": broken}
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(
        root, "testsuite", {"name": "coldstart validate", "skipped": "0", **counts}
    )
    suite.extend(cases)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode")


def github(reports: Sequence[ValidationReport], fail_level: FailLevel) -> str:
    """Render one workflow command per finding, of the kind of its severity."""
    return "\n".join(_command(report, finding) for report in reports for finding in report.findings)


def _cases(report: ValidationReport, fail_level: FailLevel) -> list[ElementTree.Element]:
    if not report.findings:
        return [ElementTree.Element("testcase", {"classname": _xml(report.ref), "name": report.level})]
    return [_case(report, finding, fail_level) for finding in report.findings]


def _case(report: ValidationReport, finding: Finding, fail_level: FailLevel) -> ElementTree.Element:
    name = f"{finding.code} {finding.subject}"
    case = ElementTree.Element("testcase", {"classname": _xml(report.ref), "name": _xml(name)})
    body = _xml(finding.message + (f"\nhint: {finding.hint}" if finding.hint else ""))
    if ValidationReport(report.ref, report.level, (finding,)).fails(fail_level):
        about = {"type": finding.code, "message": _xml(finding.message)}
        ElementTree.SubElement(case, "failure", about).text = body
    else:
        ElementTree.SubElement(case, "system-out").text = body
    return case


def _xml(value: str) -> str:
    # XML 1.0 has no way to write most control characters, escaped or not.
    return "".join(
        c if c in "\t\n\r" or " " <= c <= "\ud7ff" or "\ue000" <= c != "\ufffe" != c != "\uffff" else "\ufffd"
        for c in value
    )


def _command(report: ValidationReport, finding: Finding) -> str:
    title = _property(f"{finding.code} {finding.subject}")
    hint = f"; hint: {finding.hint}" if finding.hint else ""
    return f"::{GITHUB_COMMANDS[finding.severity]} title={title}::" + _data(
        f"{report.ref}: {finding.message}{hint}"
    )


def _data(value: str) -> str:
    return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: str) -> str:
    return _data(value).replace(":", "%3A").replace(",", "%2C")
