"""Each output format against its specification."""

import json
import re
import xml.etree.ElementTree as ElementTree

from coldstart.validate import renderers
from coldstart.validate.checks import ValidationReport


def test_junit_parses_and_counts(reports: list[ValidationReport]) -> None:
    root = ElementTree.fromstring(renderers.junit(reports, "error").encode())
    (suite,) = root.findall("testsuite")
    cases = suite.findall("testcase")
    assert root.tag == "testsuites"
    assert suite.attrib["tests"] == root.attrib["tests"] == str(len(cases)) == "4"
    assert suite.attrib["failures"] == "1" == str(len(suite.findall("testcase/failure")))
    assert all(case.attrib["name"] and case.attrib["classname"] for case in cases)
    (failure,) = suite.findall("testcase/failure")
    assert failure.attrib["type"] == "CS-DIGEST"
    assert failure.text is not None and "<broken> & gone" in failure.text


def test_github_escapes_data_and_properties(reports: list[ValidationReport]) -> None:
    lines = renderers.github(reports, "error").split("\n")
    assert [line.split(" ")[0] for line in lines] == ["::error", "::warning", "::notice"]
    grammar = re.compile(r"::(error|warning|notice) title=([^:,\r\n]+)::([^\r\n]+)")
    matched = [grammar.fullmatch(line) for line in lines]
    assert all(matched)
    first = matched[0]
    assert first is not None
    data = first[3].replace("%0A", "\n").replace("%0D", "\r").replace("%25", "%")
    assert '50% of "it":\r\n<broken>' in data


def test_text_and_json_agree(reports: list[ValidationReport]) -> None:
    found = renderers.document(reports, "error")
    text = renderers.text(reports, "error")
    assert found["ok"] is False
    assert "org/bad@sha256:ab: invalid at level checksum" in text
    assert "org/good@sha256:cd: valid at level checksum" in text
    assert "hint: coldstart doctor" in text
    assert json.loads(json.dumps(found))["bundles"][0]["findings"][1]["code"] == "CS-FALLBACK"
