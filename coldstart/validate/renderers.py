"""Render findings as text, JSON, JUnit XML and GitHub workflow commands.

JUnit: <testsuites>/<testsuite>/<testcase>/<failure>, as CI systems read it (Ant's JUnit report). GitHub: `::error
title=...::message`. `%`, CR and LF are escaped everywhere, and `:` and `,` in the values of properties ("Workflow commands" in
the documentation of GitHub Actions).
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from coldstart.validate.checks import FailLevel, Finding, ValidationReport

GITHUB_COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}


def build_document(reports: Sequence[ValidationReport], fail_level: FailLevel) -> Mapping[str, object]:
    """Build the JSON document of `coldstart validate`."""
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


def render_text(reports: Sequence[ValidationReport], fail_level: FailLevel) -> str:
    """Render one line per bundle, followed by its findings."""
    lines = []
    for report in reports:
        verdict = "invalid" if report.fails(fail_level) else "valid"
        lines.append(f"{report.ref}: {verdict} at level {report.level}")
        for finding in report.findings:
            message = "\n      | ".join(finding.message.splitlines())  # a log excerpt has several lines
            lines.append(f"  {finding.severity} {finding.code} [{finding.subject}] {message}")
            lines += [f"    hint: {finding.hint}"] if finding.hint else []
    return "\n".join(lines)


def render_junit(reports: Sequence[ValidationReport], fail_level: FailLevel) -> str:
    """Render a JUnit suite with a case for each finding, and a case for each bundle without findings."""
    cases = [case for report in reports for case in _build_cases(report, fail_level)]
    failed = str(sum(case.find("failure") is not None for case in cases))
    counts = {"tests": str(len(cases)), "failures": failed, "errors": "0"}
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(
        root, "testsuite", {"name": "coldstart validate", "skipped": "0", **counts}
    )
    suite.extend(cases)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode")


def render_github(reports: Sequence[ValidationReport], fail_level: FailLevel) -> str:
    """Render one GitHub workflow command per finding."""
    return "\n".join(_render_command(report, finding) for report in reports for finding in report.findings)


def _build_cases(report: ValidationReport, fail_level: FailLevel) -> list[ElementTree.Element]:
    if not report.findings:
        return [ElementTree.Element("testcase", {"classname": _escape_xml(report.ref), "name": report.level})]
    return [_build_case(report, finding, fail_level) for finding in report.findings]


def _build_case(report: ValidationReport, finding: Finding, fail_level: FailLevel) -> ElementTree.Element:
    name = f"{finding.code} {finding.subject}"
    case = ElementTree.Element("testcase", {"classname": _escape_xml(report.ref), "name": _escape_xml(name)})
    body = _escape_xml(finding.message + (f"\nhint: {finding.hint}" if finding.hint else ""))
    if ValidationReport(report.ref, report.level, (finding,)).fails(fail_level):
        attributes = {"type": finding.code, "message": _escape_xml(finding.message)}
        ElementTree.SubElement(case, "failure", attributes).text = body
    else:
        ElementTree.SubElement(case, "system-out").text = body
    return case


def _escape_xml(value: str) -> str:
    # XML 1.0 cannot represent most control characters, even escaped.
    return "".join(
        c if c in "\t\n\r" or " " <= c <= "\ud7ff" or "\ue000" <= c != "\ufffe" != c != "\uffff" else "\ufffd"
        for c in value
    )


def _render_command(report: ValidationReport, finding: Finding) -> str:
    title = _escape_data(f"{finding.code} {finding.subject}").replace(":", "%3A").replace(",", "%2C")
    hint = f"; hint: {finding.hint}" if finding.hint else ""
    return f"::{GITHUB_COMMANDS[finding.severity]} title={title}::" + _escape_data(
        f"{report.ref}: {finding.message}{hint}"
    )


def _escape_data(value: str) -> str:
    return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
